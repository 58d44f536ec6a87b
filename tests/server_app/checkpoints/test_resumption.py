"""Options that may and may not change when a run resumes."""

from types import SimpleNamespace as Stub
from typing import Any

import pytest

from server_app.checkpoints.resumption import changed, others
from server_app.places import Places

THEN: dict[str, Any] = {
    "federation": {"rounds": 2, "rounds_off": 1, "num_units": 3},
    "link": {"port": 0},
    "runtime": {"name": "local"},
    "pipeline": {"threads": 1, "dtype": "float32"},
    "model": {"config": {"depth": 2}, "name": None, "sizes": [1, 2]},
}


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("federation", {"rounds": 5, "keep": 1, "eval_every": 2, "on_infeasible": "skip"}),
        ("link", {"port": 7, "new": 1}),
        ("runtime", {"name": "simulation"}),
        ("pipeline", {"threads": 2}),
    ],
)
def test_options_that_do_not_affect_learning_may_change(
    group: str, options: dict[str, Any]
) -> None:
    assert changed(THEN, {**THEN, group: {**THEN[group], **options}}) == {}


@pytest.mark.parametrize(
    ("group", "options", "found"),
    [
        ("federation", {"num_units": 4}, {"federation.num_units": ("3", "4")}),
        ("federation", {"rounds_off": 2}, {"federation.rounds_off": ("1", "2")}),
        ("pipeline", {"dtype": "float64"}, {"pipeline.dtype": ('"float32"', '"float64"')}),
        ("model", {"config": {"depth": 3}}, {"model.config.depth": ("2", "3")}),
        ("model", {"sizes": [2, 1]}, {"model.sizes": ("[1, 2]", "[2, 1]")}),
        ("model", {"name": "bert"}, {"model.name": ("null", '"bert"')}),
        ("model", {"width": 1}, {"model.width": ("not there", "1")}),
        ("model", {"config": {}}, {"model.config": ("not there", "{}")}),
    ],
)
def test_other_changed_options_are_named_with_both_values(
    group: str, options: dict[str, Any], found: dict[str, tuple[str, str]]
) -> None:
    later = {**THEN, group: {**THEN[group], **options}}
    assert found.items() <= changed(THEN, later).items()
    assert found.keys() <= changed(later, THEN).keys()
    assert changed(later, later) == {}


def test_few_of_many_missing_units_are_named() -> None:
    reported = Stub(scheduler=Stub(roster=Stub(reported=())))
    history = Stub(rounds=dict.fromkeys(range(200), 1))
    checkpoint: Any = Stub(progress=Stub(**vars(reported), history=history, names={}))
    expected = "; new: unit 200; missing: unit 0, unit 1, unit 2 and 196 more"
    assert others(checkpoint, {199, 200}, Places()) == expected
