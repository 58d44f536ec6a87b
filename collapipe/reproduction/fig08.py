"""Fig. 8: accumulated time on devices, BERT."""

from collections.abc import Sequence

from collapipe.reproduction import accumulated
from collapipe.reproduction.worlds import BERT_BLOCKS
from collapipe.runs.evidence import Evidence


def evidence(seeds: Sequence[int]) -> Evidence:
    """See ``accumulated``."""
    return accumulated.evidence(seeds, BERT_BLOCKS)
