"""Fig. 8: accumulated time on devices, BERT."""

from collections.abc import Sequence

from collapipe.cli.reproduce import accumulated
from collapipe.cli.reproduce.evidence import Evidence
from collapipe.cli.reproduce.worlds import BERT_BLOCKS


def evidence(seeds: Sequence[int]) -> Evidence:
    """See ``accumulated``."""
    return accumulated.evidence(seeds, BERT_BLOCKS)
