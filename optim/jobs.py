"""Simulate jobs that workers do in turn, if some share the cores of a machine."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Key = tuple[Hashable, ...]
_DONE_S = 1e-12


@dataclass(frozen=True, slots=True)
class Job:
    """Work of ``seconds`` that begins after the jobs ``needs``."""

    seconds: float
    needs: tuple[Key, ...] = ()


@dataclass(slots=True)
class Worker:
    """Does one job at a time: the first one of its ``lanes`` whose turn has come and whose needs
    are done. Each lane keeps its order.

    A worker with a ``host`` needs one of the machine's cores, which it shares with others.
    """

    lanes: tuple[Sequence[Key], ...]
    host: str | None = None
    running: Key | None = None
    places: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [0] * len(self.lanes)

    def begin(self, missing: Mapping[Key, int]) -> Key | None:
        """Take the next job whose needs are all done (``missing`` 0); None if there is none or one
        is running."""
        for lane, place in enumerate(self.places if self.running is None else ()):
            keys = self.lanes[lane]
            if place < len(keys) and not missing[keys[place]]:
                self.places[lane] += 1
                self.running = keys[place]
                return self.running
        return None


def simulate(
    jobs: Mapping[Key, Job], workers: Sequence[Worker], cores: Mapping[str, int]
) -> dict[Key, tuple[float, float]]:
    """Return when each job begins and ends, in seconds. Workers on a machine with fewer cores
    than running jobs share the cores equally."""
    owners = {key: worker for worker in workers for lane in worker.lanes for key in lane}
    missing = {key: len(job.needs) for key, job in jobs.items()}
    after = defaultdict[Key, list[Key]](list)
    for key, job in jobs.items():
        for need in job.needs:
            after[need].append(key)
    now, idle, active = 0.0, list(workers), dict[Key, str | None]()
    began, left, ran = dict[Key, float](), dict[Key, float](), dict[Key, tuple[float, float]]()
    while True:
        for worker in idle:
            if (taken := worker.begin(missing)) is not None:
                began[taken], left[taken], active[taken] = now, jobs[taken].seconds, worker.host
        if not active:
            return ran
        load = Counter(active.values())
        rates = {
            key: 1.0 if host is None else min(1.0, cores[host] / load[host])
            for key, host in active.items()
        }
        step = min(left[key] / rates[key] for key in active)
        now += step
        idle = []
        for key, rate in rates.items():
            left[key] -= step * rate
            if left[key] <= _DONE_S:
                ran[key] = began[key], now
                del active[key]
                owners[key].running = None
                idle.append(owners[key])
                for later in after[key]:
                    missing[later] -= 1
                    idle.append(owners[later])
