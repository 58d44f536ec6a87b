"""A daemon refuses damaged frames of certified peers, continues to run and does not leak memory."""

import time
from collections.abc import Callable

import psutil
import pytest
from device_cluster import Work, daemons, device_name, plan_of
from device_process import device_process
from hostile_peer import HostileUnit, Mutator, description_of, loading, recorded

from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.frames import Frame, FrameKind
from pipeline.devices.messages import BEFORE, BEHIND, neighbour_name

PLAN = plan_of([device_name(0)], (4,))
MB = 2**20


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    """Recorded frames of a round on one device and of a round on two devices."""
    return [*recorded(1), *recorded(2)]


def attack_control(unit: HostileUnit, frames: list[Frame], mutator: Mutator, count: int) -> None:
    """Send damaged commands to a daemon, with and without a loaded segment."""
    for _ in range(count):
        if mutator.chance(0.1):
            unit.load(loading(frames))
        unit.control.send(mutator.message())
        unit.settled()


def attack_hops(unit: HostileUnit, frames: list[Frame], mutator: Mutator, count: int) -> None:
    """Send damaged tensors to a daemon in the middle of a step."""
    own = loading(frames)
    session = description_of(own[0])["session"]
    begin = next(each for each in frames if each.kind == FrameKind.BEGIN)
    left = count
    while left > 0:
        assert unit.load(own)
        streams = [unit.hop(session, neighbour_name(side, 0)) for side in (BEFORE, BEHIND)]
        unit.control.send_frame(begin)
        for _ in range(4):
            stream = streams[mutator.chance(0.5)]
            if mutator.chance(0.4):
                stream.send_frame(mutator.frame(FrameKind.ACTIVATION, FrameKind.GRADIENT))
            else:
                stream.send(mutator.message())
                left -= 1
        unit.settled()
        for stream in streams:
            stream.close()


ATTACKS = attack_control, attack_hops
Attack = Callable[[HostileUnit, list[Frame], Mutator, int], None]


def still_trains(address: str) -> bool:
    """Whether a round on the daemon has the bits of a round in one thread."""
    there = [DeviceAddress(device_name(0), address)]
    return Work().remote(PLAN, there).equals(Work().inline(PLAN))


@pytest.mark.parametrize("attack", ATTACKS)
def test_damaged_frames_are_refused_and_the_daemon_still_trains(
    attack: Attack, frames: list[Frame]
) -> None:
    with daemons(1) as (daemon,):
        with HostileUnit(daemon.address) as unit:
            attack(unit, frames, Mutator(frames, 1), 80)
        assert all("\n" not in each for each in unit.troubles)
        assert still_trains(daemon.address)


@pytest.mark.faults
def test_12000_damaged_frames_do_not_leak_memory_handles_or_threads(frames: list[Frame]) -> None:
    """A daemon process has at most 8 MB and 3 handles and threads more than after the first
    4,000."""
    with device_process("--memory", "1GB", environment={"MALLOC_ARENA_MAX": "2"}) as device:
        process, seen = psutil.Process(device.process.pid), list[tuple[float, int, int]]()
        drawn = Mutator(frames, 2)
        for share in (4_000, 4_000, 4_000):
            with HostileUnit(device.address) as unit:
                for attack, part in zip(ATTACKS, (0.6, 0.4), strict=True):
                    attack(unit, frames, drawn, int(part * share))
            assert still_trains(device.address)
            seen.append(held_by(process))
        print(seen)
    (before_mb, *before), *_, (after_mb, *after) = seen
    assert after_mb <= before_mb + 8
    assert all(late <= early + 3 for early, late in zip(before, after, strict=True))


def held_by(process: psutil.Process) -> tuple[float, int, int]:
    """Memory in MB, handles and threads, 1 s later, when ended streams have been freed."""
    time.sleep(1.0)
    return process.memory_info().rss / MB, process.num_fds(), process.num_threads()
