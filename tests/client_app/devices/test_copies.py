"""How often real devices send copies of their blocks."""

import pytest

from client_app.devices.copies import Sending, copied_bytes, copy_interval
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span


@pytest.mark.parametrize(
    ("copy_bytes", "sending", "steps"),
    [
        (1e4, Sending(1e6), 1),  # adapters
        (3e5, Sending(1e6), 10),  # limited by bytes only
        (3e5, Sending(1e6, share=0.2), 2),  # a fast network
        (3e5, Sending(1e6, share=7.0), 10),
        (2e7, Sending(4e6, share=0.5), 20),  # the most steps that a loss may repeat
        (2e7, Sending(0.0, share=0.0), 1),  # as a faulty device reports
    ],
)
def test_copies_take_a_small_share_of_a_step(
    copy_bytes: float, sending: Sending, steps: int
) -> None:
    assert copy_interval({"pi": copy_bytes}, {"pi": sending}) == steps


@pytest.mark.parametrize(("storing", "steps"), [(0.0, 1), (0.1, 4), (5.0, 20)])
def test_storing_copies_takes_a_small_share_of_a_step(storing: float, steps: int) -> None:
    assert copy_interval({"pi": 1e4}, {"pi": Sending(1e6)}, storing) == steps


def test_a_device_sends_copies_of_the_blocks_that_it_leads() -> None:
    shares = Share("a", 2), Share("b", 2), Share("c", 1)
    alone, shared = SegmentPlan("d", Span(0, 3)), SegmentPlan("a", Span(3, 5), shares)
    plan = ClusterPlan(0, (alone, shared), 1, "gpipe")
    assert copied_bytes(plan, 7.0) == {"d": 21.0, "a": 14.0, "b": 14.0, "c": 7.0}


def test_the_device_that_sends_copies_longest_decides() -> None:
    sending = {"pi": Sending(1e6, share=0.5), "jetson": Sending(1e6, share=0.1)}
    assert copy_interval({"pi": 1.2e5, "jetson": 3e5}, sending) == 2
