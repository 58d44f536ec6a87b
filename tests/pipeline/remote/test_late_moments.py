"""The optimiser's state follows behind the weights: a step begins without it, and ends with it."""

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from device_cluster import Result, Work, daemons, device_name, plan_of

from collapipe.wire.frames import FrameKind
from device_app.daemon import Daemon
from pipeline.head import LocalHead
from pipeline.remote.placement import Placement
from pipeline.remote.replica import Replica

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


@pytest.fixture(scope="module")
def work() -> Work:
    """A round that begins with moments."""
    return Work().after(Work().inline(PLAN))


@pytest.fixture(scope="module")
def expected(work: Work) -> Result:
    """The round in one thread."""
    return work.inline(PLAN)


def test_a_step_begins_without_moments(
    work: Work, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is sent before the head has got the last activation of the first step."""
    late, send = list[Callable[[], None]](), Placement._send

    def sending(*what: Any) -> None:
        if FrameKind.MOMENTS in what:
            late.append(partial(send, *what))
        else:
            send(*what)

    class Telling(LocalHead):
        def submit(self, micro_batch: int, hidden: torch.Tensor) -> None:
            super().submit(micro_batch, hidden)
            if (self._key.step, micro_batch) == (0, PLAN.num_micro_batches - 1):
                assert len(late) == 4
                for sent in late:
                    sent()

    monkeypatch.setattr(Placement, "_send", sending)
    with daemons(3) as there:
        assert work.remote(PLAN, there, head_of=Telling).equals(expected)


@pytest.mark.parametrize(("block", "lost"), [(0, 0), (1, 2), (2, 1), (3, 0)])
def test_a_device_may_go_while_moments_are_on_the_way(
    work: Work, expected: Result, block: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a certain block's are sent, to that device or to another."""
    packed, gone = Replica.packed, list[threading.Thread]()

    def losing(replica: Replica, name: str, keys: Collection[str]) -> torch.Tensor:
        if name == f"blocks.{block}" and any("/" in key for key in keys) and not gone:
            gone.append(threading.Thread(target=ended, args=(there[lost],)))
            gone[0].start()
        return packed(replica, name, keys)

    monkeypatch.setattr(Replica, "packed", losing)
    with daemons(3) as there:
        assert work.remote(PLAN, there, lost=[NAMES[lost]]).equals(expected)
        assert gone


def ended(daemon: Daemon) -> None:
    """At once, without a word."""
    daemon._server.stop(None).wait()
