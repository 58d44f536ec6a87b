"""Fig. 7: accumulated time on devices, the classic Transformer."""

from collections.abc import Sequence

from collapipe.cli.reproduce import accumulated
from collapipe.cli.reproduce.evidence import Evidence
from collapipe.cli.reproduce.worlds import TRANSFORMER_BLOCKS


def evidence(seeds: Sequence[int]) -> Evidence:
    """See ``accumulated``."""
    return accumulated.evidence(seeds, TRANSFORMER_BLOCKS)
