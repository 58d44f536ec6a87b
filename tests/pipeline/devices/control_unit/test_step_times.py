"""The typical times of a round's steps are means of what its devices and control unit measured."""

import pytest

from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from pipeline.devices.control_unit.own_times import OwnTimes
from pipeline.devices.control_unit.step_times import typical_times
from pipeline.schedule import BACKWARD, FORWARD, Action

ALONE = SegmentPlan("a", Span(0, 1))
SHARED = SegmentPlan("a", Span(0, 1), (Share("a", 1), Share("b", 1)))
TABLE = [  # requested, began, ended, sent
    [0.0, 1.9, 3.0, 3.0],  # embedded at 1.0
    [3.0, 3.2, 4.0, 4.0],  # at 3.1
    [4.0, 6.1, 7.0, 7.0],  # answered at 6.0
    [7.0, 8.1, 9.0, 9.0],  # at 8.0
]


@pytest.mark.parametrize(
    ("segment", "sent_s", "late_s"),
    [(ALONE, (0.9 + 0.1 + 0.1 + 0.1) / 4, 0.0), (SHARED, 0.1, 0.9 - 0.1)],
    ids=["alone", "shared"],
)
def test_the_wait_for_the_last_steps_weights_is_no_time_of_sending(
    segment: SegmentPlan, sent_s: float, late_s: float
) -> None:
    """Devices that share the first stage wait 0.8 s for weights before its first micro-batch."""
    forward, backward = (
        [Action(kind, number) for number in (0, 1)] for kind in (FORWARD, BACKWARD)
    )
    embedding = dict(zip(forward, [(0.5, 1.0), (2.0, 3.1)], strict=True))
    head = dict(
        zip([*forward, *backward], [(3.0, 3.0), (4.0, 4.0), (5.0, 6.0), (7.0, 8.0)], strict=True)
    )
    plan = ClusterPlan(0, (segment,), 2, "gpipe")
    own = OwnTimes(embedding, head, 0.0, 9.5)
    found = typical_times(plan, [own], {name: [TABLE] for name in segment.devices})
    assert found is not None
    assert (found.send_s[None], found.late_s) == pytest.approx((sent_s, late_s))
