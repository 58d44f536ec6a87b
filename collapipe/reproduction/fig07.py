"""Fig. 7: accumulated time on devices, the classic Transformer."""

from collections.abc import Sequence

from collapipe.reproduction import accumulated
from collapipe.reproduction.worlds import TRANSFORMER_BLOCKS
from collapipe.runs.evidence import Evidence


def evidence(seeds: Sequence[int]) -> Evidence:
    """See ``accumulated``."""
    return accumulated.evidence(seeds, TRANSFORMER_BLOCKS)
