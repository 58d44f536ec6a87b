"""The sides of a ratio: they take turns, so that both have the same load."""

import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.machine import machine
from tests.network import UnavailableError, cpu_quota

Side = Callable[[], object]
Seconds = dict[str, list[float]]
_LIKE, _AT_ONCE = 2.0, 8.0  # processes of this machine
_ALL = Path("/sys/fs/cgroup/cpu/cgroup.procs")
WARM = 2  # warm-up turns


def turns(
    sides: Mapping[str, Side], count: int, pids: Mapping[str, Sequence[int]]
) -> tuple[Seconds, Seconds]:
    """Wall seconds and processor seconds of each side in each of ``count`` turns, after warm-up
    turns. ``pids`` are the processes of each side whose processor seconds count."""
    clock: Seconds = {name: [] for name in sides}
    processor: Seconds = {name: [] for name in sides}
    for turn in range(-WARM, count):
        for name, run in sides.items():
            used, start = cpu_s(pids.get(name, ())), time.perf_counter()
            run()
            if turn >= 0:
                clock[name].append(time.perf_counter() - start)
                processor[name].append(cpu_s(pids.get(name, ())) - used)
    return clock, processor


@contextmanager
def equal_shares(groups: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Give each side the weight of two processes on a busy machine, for any number of processes.

    Otherwise a side with more processes gets more processor time, as it does without cgroups.
    """
    cores = float(os.cpu_count() or 1)
    with ExitStack() as stack:
        try:
            for pids in groups.values():
                group = stack.enter_context(cpu_quota(cores, _LIKE))
                stack.callback(_move, pids, _ALL)
                _move(pids, group)
        except UnavailableError as error:
            print(f"sides are not weighed alike: {error}")
        yield


@contextmanager
def limited(pid: int, cores: float) -> Iterator[None]:
    """Limit a process to the speed of ``cores``, also on a busy machine.

    Raises ``UnavailableError`` without cgroups.
    """
    with cpu_quota(cores, _AT_ONCE) as group:
        _move([pid], group)
        try:
            yield
        finally:
            _move([pid], _ALL)


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        group.write_text(str(pid))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the turns' ratios, and their quartiles."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    if len(found) < 4:
        return f"{statistics.median(found):.3f}"
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.3f} (quartiles {low:.3f}–{high:.3f})"


def cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds that processes have used."""
    times = (psutil.Process(pid).cpu_times() for pid in pids)
    return sum(each.user + each.system for each in times)


def about(arguments: Namespace) -> dict[str, object]:
    """The machine, its load, and the arguments."""
    options = {key: str(each) for key, each in vars(arguments).items() if not callable(each)}
    return {**machine(), "load": os.getloadavg()[0], **options}


def save(output: Path, name: str, result: Mapping[str, object]) -> None:
    """Write ``name``.json, with the load at the end."""
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**result, "load_at_end": os.getloadavg()[0]}, indent=2)
    (output / f"{name}.json").write_text(text + "\n")
