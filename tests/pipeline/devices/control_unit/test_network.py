"""Daemons with credentials in network namespaces, connected by links of 100 Mbit/s."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_cluster import Work, device_name, plan_of

from collapipe.models.part import HeadPart
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan, SegmentPlan, Share, Span
from pipeline.head import LocalHead
from tests.boxes import Boxes, boxes
from tests.network import Network, UnavailableError, network

COUNT, RATE_BPS, SLOW_BPS = 3, 100e6, 2e6
PLAN = plan_of([device_name(k) for k in range(COUNT)], (1, 2, 1))
NOTICED_S = 6.0  # no sign of life for 5 s, checked ten times a second
BUSY_S = 4.0  # the additional delay of a busy machine


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Network, Boxes]]:
    """A network and its daemons."""
    try:
        with (
            network(COUNT, RATE_BPS) as made,
            boxes(tmp_path_factory.mktemp("boxes"), made.places) as started,
        ):
            yield made, started
    except UnavailableError as error:
        pytest.skip(str(error))


def test_a_round_over_the_network_equals_inline(there: tuple[Network, Boxes]) -> None:
    _, started = there
    found = Work().remote(PLAN, started.daemons, dialer=started.dialer)
    assert found.equals(Work().inline(PLAN))


def test_a_round_continues_after_a_link_is_cut_in_a_step(
    there: tuple[Network, Boxes], caplog: pytest.LogCaptureFixture
) -> None:
    """The device is alive and no connection is closed; the control unit detects the loss and
    continues without it."""
    made, started = there
    cut_s = list[float]()

    class Cutting(LocalHead):
        """Cuts the second device's link when the head receives micro-batch 1 of step 1."""

        def submit(self, micro_batch: int, hidden: object) -> None:
            super().submit(micro_batch, hidden)
            if (self._key.step, micro_batch) == (1, 1) and not cut_s:
                cut_s.append(time.time())
                made.cut(1)

    def head_of(part: HeadPart) -> LocalHead:
        return Cutting(part)

    try:
        with caplog.at_level(logging.INFO, "pipeline.devices.control_unit"):
            found = Work().remote(
                PLAN,
                started.daemons,
                dialer=started.dialer,
                head_of=head_of,
                lost=[device_name(1)],
            )
    finally:
        made.mend(1)
    assert found.equals(Work().inline(PLAN))
    noticed = next(each for each in caplog.records if device_name(1) in each.getMessage())
    assert noticed.created - cut_s[0] < NOTICED_S + BUSY_S


@pytest.mark.faults
def test_three_devices_that_share_a_stage_over_slow_links_are_not_lost(tmp_path: Path) -> None:
    """Sending gradients takes ten seconds, and delays signs of life and acknowledgements."""
    work = Work(TransformerSpec(4, 1, 96, 2, 384, 0.3), hung_s=300.0)
    shares = tuple(Share(device_name(k), 1) for k in range(COUNT))
    stage = SegmentPlan(device_name(0), Span(0, 4), shares)
    plan = ClusterPlan(0, (stage,), 2, "gpipe")
    try:
        with network(COUNT, SLOW_BPS) as made, boxes(tmp_path, made.places) as started:
            found = work.remote(plan, started.daemons, dialer=started.dialer)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert found.equals(work.inline(plan))
