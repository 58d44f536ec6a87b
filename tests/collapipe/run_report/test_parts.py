"""Markup and axes."""

from pathlib import Path

import pytest
from round_report import round_report

from collapipe.formatting import seconds
from collapipe.plan import ClusterPlan, RoundPlan, SegmentPlan, Span
from collapipe.report import ClusterCost, RoundCost
from collapipe.run_report.drawing import scale
from collapipe.run_report.html import Markup, join, tag
from collapipe.run_report.round import gantt
from collapipe.runs.reading import read_run


def test_markup_escapes_all_but_itself() -> None:
    made = tag("p", "<i>", Markup("<b>"), 3, None, class_='"', data_x="<", hidden=None)
    assert made == '<p class="&quot;" data-x="&lt;">&lt;i&gt;<b>3</p>'
    assert join("a", Markup("&"), "&") == "a&&amp;"


@pytest.mark.parametrize(
    ("values", "whole", "names"),
    [
        ([0, 10], False, ["0", "2", "4", "6", "8", "10"]),
        ([0.2, 0.9], False, ["0.2", "0.4", "0.6", "0.8"]),
        ([1, 200], True, ["50", "100", "150", "200"]),
        ([1, 3], True, ["1", "2", "3"]),
        ([4, 4], True, None),
        ([0.0], False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),  # nothing is less
        ([], False, None),
        ([1e-12, 3e-12], False, ["1e-12", "1.5e-12", "2e-12", "2.5e-12", "3e-12"]),
        ([0, 4.2e6], False, ["0", "1M", "2M", "3M", "4M"]),
        ([-3, 3], False, ["-2", "0", "2"]),
        ([0, 9_000], False, ["0", "2,000", "4,000", "6,000", "8,000"]),
        ([3840, 57_600], False, ["20k", "40k"]),
        ([0, 600_000], False, ["0", "200k", "400k", "600k"]),
    ],
)
def test_ticks_are_round_and_inside(
    values: list[float], whole: bool, names: list[str] | None
) -> None:
    axis = scale(values, 50, 400, whole=whole)
    assert axis.ticks and axis.low < axis.high
    assert all(49.9 <= axis.at(tick) <= 400.1 for tick in axis.ticks)
    assert all(49.9 <= axis.at(value) <= 400.1 for value in values)
    assert len(set(axis.names())) == len(axis.ticks)
    if names:
        assert axis.names() == names


@pytest.mark.parametrize("largest", [9.9e3, 1.1e4, 57_600, 999_999, 3.2e6, 5.7e9, 8e12])
def test_what_stands_beside_a_tick_is_its_value(largest: float) -> None:
    axis = scale([0.0, largest], 0, 100)
    powers = {"k": 1e3, "M": 1e6, "G": 1e9}
    for tick, name in zip(axis.ticks, axis.names(), strict=True):
        shown = float(name.rstrip("kMG").replace(",", "")) * powers.get(name[-1], 1.0)
        assert shown == pytest.approx(tick, rel=1e-9)


@pytest.mark.parametrize("stem_s", [0.0, 5.0])
def test_a_frozen_stem_stands_before_the_pipeline(run: Path, stem_s: float) -> None:
    plan = RoundPlan(1, (ClusterPlan(0, (SegmentPlan("a", Span(0, 2)),), 2, "gpipe"),))
    cost = RoundCost(4.0 + stem_s, (ClusterCost(0, 3.0, 1.0, 0.0, {}, 4.0, stem_s),))
    drawn = str(gantt(read_run(run), round_report(plan=plan, cost=cost)))
    assert ("frozen stem" in drawn) == (stem_s > 0)
    for part in (3.0, 1.0, 4.0 + stem_s):
        assert seconds(part) in drawn
