"""Fig. 9: translation with several numbers of segments and micro-batches."""

from collections.abc import Sequence

from collapipe.reproduction import sensitivity
from collapipe.reproduction.sensitivity import Study, split
from collapipe.reproduction.training import Experiment, Training
from collapipe.runs.evidence import Evidence

_BEST = "S = 2, m = 2 is best"
_VARIANTS = split(2, 2), split(6, 2), split(2, 8)
STUDY = Study(
    Experiment("fig09", "multi30k", "full_transformer"),
    ("model.dropout",),
    _VARIANTS,
    {each.label: _BEST for each in _VARIANTS[1:]},
)


def evidence(seeds: Sequence[int], training: Training) -> Evidence:
    """See ``sensitivity``."""
    return sensitivity.evidence(seeds, training, STUDY)
