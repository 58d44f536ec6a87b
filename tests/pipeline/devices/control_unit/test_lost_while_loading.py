"""Losses while blocks are sent; the optimiser's state is sent after the weights."""

import threading
from collections.abc import Collection

import pytest
import torch
from device_cluster import Result, Work, daemons, device_name, plan_of

from pipeline.devices.control_unit import segments
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.daemon.server import Daemon
from tests.thorough import chosen

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


@pytest.fixture(scope="module")
def work() -> Work:
    """A round that starts with optimiser state."""
    return Work().after(Work().inline(PLAN))


@pytest.fixture(scope="module")
def expected(work: Work) -> Result:
    """The result of the round in one thread."""
    return work.inline(PLAN)


def test_a_step_starts_before_the_optimiser_state_is_sent(
    work: Work, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is sent after the first activation has passed all devices."""
    load, packed = segments.load, Replica.packed
    placed, begun = list[Placement](), list[bool]()

    def loading(placement: Placement) -> None:
        placed.append(placement)
        load(placement)

    def noting(replica: Replica, name: str, keys: Collection[str]) -> torch.Tensor:
        if any("/" in key for key in keys):
            begun.append(placed[0].hops[1].bytes_in > 0)
        return packed(replica, name, keys)

    monkeypatch.setattr(segments, "load", loading)
    monkeypatch.setattr(Replica, "packed", noting)
    with daemons(3) as there:
        assert work.remote(PLAN, there).equals(expected)
        assert begun == [True] * 4


@pytest.mark.parametrize(
    ("block", "lost", "state"),
    chosen(
        [(*each, state) for each in ((0, 0), (1, 2), (2, 1), (3, 0)) for state in (False, True)],
        [(0, 0, False), (1, 2, True), (2, 1, False), (3, 0, True)],
    ),
)
def test_a_device_may_be_lost_while_parts_are_sent(
    work: Work,
    expected: Result,
    block: int,
    lost: int,
    state: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is lost just before a part of a block is sent to it or to another device."""
    packed, threads = Replica.packed, list[threading.Thread]()

    def losing(replica: Replica, name: str, keys: Collection[str]) -> torch.Tensor:
        hit = name == f"blocks.{block}" and any("/" in key for key in keys) == state
        if hit and not threads:
            threads.append(threading.Thread(target=ended, args=(there[lost],)))
            threads[0].start()
        return packed(replica, name, keys)

    monkeypatch.setattr(Replica, "packed", losing)
    with daemons(3) as there:
        assert work.remote(PLAN, there, lost=[device_name(lost)]).equals(expected)
        assert threads


def ended(daemon: Daemon) -> None:
    """Stop the daemon's server immediately, without a message."""
    daemon._server.stop(None).wait()
