"""The server checks units' evaluation replies: false ones are refused or give a finite metric."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from collapipe.errors import WireError
from collapipe.statistics import Statistics
from collapipe.tasks.causal_lm import CausalLM
from collapipe.tasks.classification import Classification
from collapipe.tasks.ner import NamedEntities
from collapipe.tasks.task import Task
from collapipe.tasks.translation import ParallelCorpus
from collapipe.wire import records
from collapipe.wire.messages import EvaluateReply
from server_app.rounds.units_evaluation import possible

LABELS = ["a", "b", "c"]
TASKS: dict[str, tuple[Task, list[int]]] = {
    "classification": (Classification(None, False, 300, 32), [3, 3]),
    "ner": (NamedEntities(None, False, 300, 32), [3]),
    "causal_lm": (CausalLM(None, False, 300, 32), [0]),
    "translation": (ParallelCorpus(300, 32, "tiny", None, "nobody/tiny", "de", "en"), [10]),
}
HONEST = Statistics(6, 9, (2.5, 1e-20), np.array([[1, 0, 0], [0, 2, 1], [1, 0, 1]]))
numbers = st.integers(-3, 3) | st.sampled_from([2**40 - 1, 2**40, 2**62, -(2**63)])


@pytest.mark.parametrize("name", TASKS)
@given(st.data())
def test_accepted_statistics_give_finite_scores(name: str, data: st.DataObject) -> None:
    """The scores are finite for one unit's statistics and for the sum of two."""
    task, shape = TASKS[name]
    counts = data.draw(npst.arrays(np.int64, shape, elements=numbers))
    rows = data.draw(st.sampled_from([int(counts.sum()), 5]))
    losses = tuple(data.draw(st.lists(st.floats(), max_size=3)))
    statistics = Statistics(rows, data.draw(st.integers(0, 4)), losses, counts)
    if rows > 0 and possible(statistics, task, LABELS):
        for score in (task.score(statistics), task.score(statistics + statistics)):
            values = [score.value, *score.extra_metrics.values()]
            assert all(np.isfinite(value) and value >= 0 for value in values)


def test_an_honest_reply_is_read_as_it_was_sent() -> None:
    found = records.unpack_evaluation(records.pack_evaluation(EvaluateReply(2, HONEST)))
    assert found.statistics is not None
    assert found.unit == 2
    assert possible(found.statistics, TASKS["classification"][0], LABELS)
    assert found.statistics.losses == HONEST.losses
    assert found.statistics.counts.tolist() == HONEST.counts.tolist()
    none = records.unpack_evaluation(records.pack_evaluation(EvaluateReply(1, None)))
    assert none == EvaluateReply(1, None)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"rows": 7},
        {"rows": 2**31, "counts": HONEST.counts * 0 + [[2**31, 0, 0], [0, 0, 0], [0, 0, 0]]},
        {"tokens": 2**40},
        {"losses": (float("nan"),)},
        {"losses": (float("inf"), float("-inf"))},
        {"losses": (1e5,)},
        {"losses": (-0.1,)},
        {"losses": (1e308, 1e308)},
        {"counts": HONEST.counts[:2]},
        {"counts": np.array([[8, 0, 0], [0, -2, 0], [0, 0, 0]])},
        {"counts": np.zeros(0, np.int64)},
    ],
)
def test_impossible_statistics_are_refused(change: dict[str, Any]) -> None:
    task, _ = TASKS["classification"]
    assert possible(HONEST, task, LABELS)
    assert not possible(replace(HONEST, **change), task, LABELS)


@pytest.mark.parametrize(
    "change",
    [{"rows": -1}, {"rows": 1.5}, {"tokens": 2**60}, {"losses": [0.5] * 65}, {"unit": "a"}],
)
def test_an_invalid_reply_is_refused(change: dict[str, Any]) -> None:
    content = records.pack_evaluation(EvaluateReply(2, HONEST))
    record = content["EvaluationRecord"]
    assert isinstance(record, ConfigRecord)
    record["json"] = json.dumps(json.loads(str(record["json"])) | change)
    with pytest.raises(WireError):
        records.unpack_evaluation(content)


@pytest.mark.parametrize("counts", [None, torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.int32)])
def test_counts_must_be_whole_numbers(counts: torch.Tensor | None) -> None:
    content = records.pack_evaluation(EvaluateReply(2, HONEST))
    content["counts"] = records.pack_tensors({} if counts is None else {"counts": counts})
    with pytest.raises(WireError, match="whole numbers"):
        records.unpack_evaluation(content)
