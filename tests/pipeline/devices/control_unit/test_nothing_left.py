"""Rounds on devices leave no processes, ports, threads, files, memory or handles."""

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
    """This process's child processes, listening ports and threads, and our files in ``folder``."""
    own = psutil.Process()
    listening = [each for each in own.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return {
        "processes": {each.pid for each in own.children(recursive=True)},
        "ports": {each.laddr.port for each in listening},
        "threads": {each.ident for each in threading.enumerate()},
        "files": {*folder.rglob("collapipe*")},
    }


def soon(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` becomes true within 30 s."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_round_with_a_loss_leaves_no_processes_ports_threads_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round loses a device; then the daemons and the control unit end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = there(folder)
    with daemons(3) as started:
        assert len(there(folder)["ports"] - before["ports"]) == 2 * 3  # with those of data
        with planted([Fault(started[1], 9, True, True)]):
            found = Work().remote(PLAN, started, lost=[NAMES[1]])
        assert found.equals(Work().inline(PLAN))
    left = {name: set[object]() for name in before}

    def clean() -> bool:
        left.update({name: now - before[name] for name, now in there(folder).items()})
        return not any(left.values())

    assert soon(clean), left


def test_blocks_are_freed_when_their_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python's garbage collector, because the next blocks need the memory."""
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
    """Kills a device when the head receives micro-batch 1 of step 1."""

    def __init__(self, part: HeadPart, device: DeviceProcess) -> None:
        super().__init__(part)
        self._device = device

    def submit(self, micro_batch: int, hidden: object) -> None:
        super().submit(micro_batch, hidden)  # type: ignore[arg-type]
        if (self._key.step, micro_batch) == (1, 1):
            self._device.process.kill()


def held_by(process: psutil.Process) -> tuple[float, int, int]:
    """Memory in MB, handles and threads."""
    return process.memory_info().rss / MB, process.num_fds(), process.num_threads()


def released(processes: Sequence[psutil.Process], before: Sequence[tuple[float, int, int]]) -> bool:
    """Whether each process has at most 3 handles and 3 threads more than before (libraries need a
    few)."""
    return all(
        now <= then + 3
        for process, held in zip(processes, before, strict=True)
        for now, then in zip(held_by(process)[1:], held[1:], strict=True)
    )


@contextmanager
def started(listen: str = "127.0.0.1:0") -> Iterator[DeviceProcess]:
    """A daemon that provides 1 GB."""
    quiet = {"MALLOC_ARENA_MAX": "2"}  # otherwise each new thread may allocate its own arena
    with device_process("--memory", "1GB", "--listen", listen, environment=quiet) as device:
        yield device


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_300_rounds_with_killed_devices_have_the_same_bits_and_do_not_leak() -> None:
    """Every tenth round loses a device, which restarts for the next round."""
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
                soon(lambda: len(seen) < 2 or released(own, seen[1]))
                seen.append([held_by(each) for each in own])
                print(number, seen[-1], flush=True)
        assert released(own, seen[1])
    assert all(late[0] <= early[0] + 8 for early, late in zip(seen[1], seen[-1], strict=True))
