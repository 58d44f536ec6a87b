"""HTML markup and the chart of a round."""

from pathlib import Path

import pytest
from round_report import round_report

from collapipe.formatting import seconds
from collapipe.plan import ClusterPlan, RoundPlan, SegmentPlan, Span
from collapipe.report import ClusterCost, RoundCost
from collapipe.run_report.html import Markup, join, tag
from collapipe.run_report.round import gantt
from collapipe.runs.reading import read_run


def test_markup_escapes_all_text_except_markup() -> None:
    made = tag("p", "<i>", Markup("<b>"), 3, None, class_='"', data_x="<", hidden=None)
    assert made == '<p class="&quot;" data-x="&lt;">&lt;i&gt;<b>3</p>'
    assert join("a", Markup("&"), "&") == "a&&amp;"


@pytest.mark.parametrize("stem_s", [0.0, 5.0])
def test_the_chart_of_a_round_shows_a_frozen_stem_and_early_uploads(
    run: Path, stem_s: float
) -> None:
    plan = RoundPlan(1, (ClusterPlan(0, (SegmentPlan("a", Span(0, 2)),), 2, "gpipe"),))
    cost = RoundCost(4.0 + stem_s, (ClusterCost(0, 3.0, 1.0, 0.0, {}, 4.0, stem_s),))
    drawn = str(gantt(read_run(run), round_report(plan=plan, cost=cost)))
    assert ("frozen stem" in drawn) == (stem_s > 0)
    assert "begin during the pipeline" not in drawn
    soon = RoundCost(3.5 + stem_s, (ClusterCost(0, 3.0, 1.0, 0.0, {}, 3.5, stem_s),))
    sooner = str(gantt(read_run(run), round_report(plan=plan, cost=soon)))
    assert "begin during the pipeline" in sooner
    for part in (3.0, 1.0, 4.0 + stem_s):
        assert seconds(part) in drawn
