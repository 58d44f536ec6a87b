"""Fig. 10: named entities with several numbers of micro-batches, and without segment scheduling."""

from collections.abc import Sequence

from collapipe.reproduction import sensitivity
from collapipe.reproduction.sensitivity import UNLIMITED, Study, Variant, split
from collapipe.reproduction.training import Experiment, Training
from collapipe.runs.evidence import Evidence

_SMALL, _LARGE = split(2, 2), split(2, 8)
_BLIND = Variant(
    "w/o SS, m ≤ 2",
    "no-ss",
    (
        UNLIMITED,
        "framework=collapipe_no_ss",
        "strategy.latency=bound",
        "pipeline.num_micro_batches=2",
    ),
)
STUDY = Study(
    Experiment("fig10", "chinese_ner", "full_bert"),
    ("model.config.hidden_dropout_prob", "model.config.attention_probs_dropout_prob"),
    (_SMALL, _LARGE, _BLIND),
    {
        _LARGE.label: "a smaller m converges better",
        _BLIND.label: "slightly worse without segment scheduling",
    },
)


def evidence(seeds: Sequence[int], training: Training) -> Evidence:
    """See ``sensitivity``."""
    return sensitivity.evidence(seeds, training, STUDY)
