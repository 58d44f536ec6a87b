"""What runs, listens, is held or lies about after rounds on devices: what was there before."""

import gc
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from device_cluster import Work, daemons, device_name, plan_of
from device_process import DeviceProcess, device_process
from planted_faults import Fault, planted

from collapipe.models.part import HeadPart
from pipeline.devices.daemon.held_segment import HeldSegment
from pipeline.head import LocalHead

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))
MB = 2**20


def there(folder: Path) -> dict[str, set[object]]:
    """Processes, ports, threads and files of ours."""
    own = psutil.Process()
    listening = [each for each in own.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return {
        "processes": {each.pid for each in own.children(recursive=True)},
        "ports": {each.laddr.port for each in listening},
        "threads": {each.ident for each in threading.enumerate()},
        "files": {*folder.rglob("collapipe*")},
    }


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it is so within a while."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_of_ours_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round that lost a device, daemons with credentials and their control unit."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = there(folder)
    with daemons(3) as started:
        assert len(there(folder)["ports"] - before["ports"]) == 3
        with planted([Fault(started[1], 9, True, True)]):
            found = Work().remote(PLAN, started, lost=[NAMES[1]])
        assert found.equals(Work().inline(PLAN))
    left = {name: set[object]() for name in before}

    def clean() -> bool:
        left.update({name: now - before[name] for name, now in there(folder).items()})
        return not any(left.values())

    assert soon(clean), left


def test_blocks_go_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when Python looks for cycles: the next ones need the memory."""
    held, real = list[weakref.ref[HeldSegment]](), HeldSegment.__init__

    def noted(self: HeldSegment, *arguments: Any) -> None:
        held.append(weakref.ref(self))
        real(self, *arguments)

    monkeypatch.setattr(HeldSegment, "__init__", noted)
    gc.disable()
    try:
        with daemons(3) as started:
            for _ in range(2):
                Work().remote(PLAN, started)
            assert soon(lambda: all(each() is None for each in held)), [each() for each in held]
    finally:
        gc.enable()
    assert len(held) == 6


class Killing(LocalHead):
    """Kills a device when the second micro-batch of the second step has come through all."""

    def __init__(self, part: HeadPart, device: DeviceProcess) -> None:
        super().__init__(part)
        self._device = device

    def submit(self, micro_batch: int, hidden: object) -> None:
        super().submit(micro_batch, hidden)  # type: ignore[arg-type]
        if (self._key.step, micro_batch) == (1, 1):
            self._device.process.kill()


def held_by(process: psutil.Process) -> tuple[float, int, int]:
    """MB, handles and threads."""
    return process.memory_info().rss / MB, process.num_fds(), process.num_threads()


def let_go(processes: Sequence[psutil.Process], before: Sequence[tuple[float, int, int]]) -> bool:
    """Whether no process has more handles or threads than before, but for a few of libraries."""
    return all(
        now <= then + 3
        for process, held in zip(processes, before, strict=True)
        for now, then in zip(held_by(process)[1:], held[1:], strict=True)
    )


@contextmanager
def started(listen: str = "127.0.0.1:0") -> Iterator[DeviceProcess]:
    """A daemon that gives 1 GB."""
    quiet = {"MALLOC_ARENA_MAX": "2"}  # or every new thread may take memory of its own
    with device_process("--memory", "1GB", "--listen", listen, environment=quiet) as device:
        yield device


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_three_hundred_rounds_with_kills_and_returns() -> None:
    """Every tenth round loses a device, which is back for the next one; all have the same bits."""
    expected, seen = Work().inline(PLAN), list[list[tuple[float, int, int]]]()
    with started() as first, started() as last, ExitStack() as stack:
        middle = stack.enter_context(started())
        own = [psutil.Process(), *(psutil.Process(each.process.pid) for each in (first, last))]
        for number in range(300):
            doomed = middle

            def head_of(part: HeadPart, doomed: DeviceProcess = doomed) -> LocalHead:
                return Killing(part, doomed) if number % 10 == 9 else LocalHead(part)  # noqa: B023

            lost = [NAMES[1]] if number % 10 == 9 else []
            there = [first, middle, last]
            assert Work().remote(PLAN, there, head_of=head_of, lost=lost).equals(expected)
            if number % 10 == 9:
                stack.close()
                middle = stack.enter_context(started(middle.address))
            if number % 50 == 49:
                time.sleep(1.0)
                soon(lambda: len(seen) < 2 or let_go(own, seen[1]))
                seen.append([held_by(each) for each in own])
                print(number, seen[-1], flush=True)
        assert let_go(own, seen[1])
    assert all(late[0] <= early[0] + 8 for early, late in zip(seen[1], seen[-1], strict=True))
