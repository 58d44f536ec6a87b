"""Simulate a step on real devices: processors, links, the control unit and the head as resources.

The closed laws in ``optim.latency`` find candidates; this simulation compares and predicts them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from collapipe.step_law import FORWARD_SHARE, StepLaw
from pipeline import schedule
from pipeline.schedule import BACKWARD, FORWARD

Key = tuple[Hashable, ...]
_DONE_S = 1e-12
_FITS = 5  # simulations until the works explain the measured times


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


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of a device in a micro-batch: seconds of its blocks on a core of its own, and of
    sending an output. ``host`` is its machine; None: not shared with others."""

    forward_s: float
    backward_s: float
    send_s: float
    host: str | None


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


def play(law: StepLaw, works: Sequence[StageWork], name: str) -> dict[Key, tuple[float, float]]:
    """Simulate a step of the schedule ``name`` on segments in pipeline order.

    Keys are (stage, kind, micro-batch); stage -1 is the embedding, stage S the head. The head's
    backward is the time at which the control unit has the answer.
    """
    last, m = len(works), law.num_micro_batches
    lists = schedule.build(name, last, m)
    jobs = dict(_jobs(law, works))
    own = [(-1, each.kind, each.micro_batch) for each in schedule.embedding(name, last, m)]
    heads = [[(last, kind, i) for i in range(m)] for kind in (BACKWARD, FORWARD)]
    workers = [Worker((*heads, own), law.host), Worker(([("head", i) for i in range(m)],))]
    for stage, (work, actions) in enumerate(zip(works, lists, strict=False)):
        order = [(stage, each.kind, each.micro_batch) for each in actions]
        workers.append(Worker((order,), work.host))
    hosts = [law.host, *(each.host for each in works), law.host]
    for place, (before, behind) in enumerate(pairwise(hosts)):
        host = before if before == behind else None  # else a network sends, without processors
        for kind, stage in ((FORWARD, place - 1), (BACKWARD, place)):
            workers.append(Worker(([("send", stage, kind, i) for i in range(m)],), host))
    delay_s = law.head_s - law.head_pace_s  # answers of several micro-batches may be on their way
    ways = max(1, min(m, math.ceil(delay_s / law.head_pace_s))) if law.head_pace_s else m
    workers += [Worker(([("answer", i) for i in range(way, m, ways)],)) for way in range(ways)]
    return simulate(jobs, workers, law.cores)


def _jobs(law: StepLaw, works: Sequence[StageWork]) -> Iterator[tuple[Key, Job]]:
    last = len(works)
    for i in range(law.num_micro_batches):
        yield (-1, FORWARD, i), Job(law.embedding_forward_s)
        yield ("send", -1, FORWARD, i), Job(law.send_s, ((-1, FORWARD, i),))
        for stage, work in enumerate(works):
            came = ("send", stage - 1, FORWARD, i)
            yield (stage, FORWARD, i), Job(work.forward_s, (came,))
            yield ("send", stage, FORWARD, i), Job(work.send_s, ((stage, FORWARD, i),))
        yield (last, FORWARD, i), Job(law.submit_s, (("send", last - 1, FORWARD, i),))
        yield ("head", i), Job(law.head_pace_s, ((last, FORWARD, i),))
        yield ("answer", i), Job(max(0.0, law.head_s - law.head_pace_s), (("head", i),))
        yield (last, BACKWARD, i), Job(0.0, (("answer", i),))
        yield ("send", last, BACKWARD, i), Job(law.send_s, ((last, BACKWARD, i),))
        for stage, work in enumerate(works):
            came = ("send", stage + 1, BACKWARD, i)
            yield (stage, BACKWARD, i), Job(work.backward_s, (came,))
            send_s = work.send_s if stage or law.embedding_backward_s else 0.0
            yield ("send", stage, BACKWARD, i), Job(send_s, ((stage, BACKWARD, i),))
        yield (-1, BACKWARD, i), Job(law.embedding_backward_s, (("send", 0, BACKWARD, i),))


def works_of(
    law: StepLaw, names: Sequence[str], block_s: Sequence[float], blocks: Sequence[int]
) -> list[StageWork]:
    """Return the work of segments on the devices ``names``, with ``block_s`` seconds of a block in
    a micro-batch. A device without measurements is like the mean of the others, on a machine of its
    own."""
    known = law.devices.values()
    share = fmean(each.forward_share for each in known) if known else FORWARD_SHARE
    send_s = fmean(each.send_s for each in known) if known else law.send_s
    works = []
    for name, each_s, count in zip(names, block_s, blocks, strict=True):
        times, seconds = law.devices.get(name), count * each_s
        if times is None:
            works.append(StageWork(share * seconds, seconds - share * seconds, send_s, None))
        else:
            forward_s = times.forward_share * seconds
            works.append(StageWork(forward_s, seconds - forward_s, times.send_s, times.host))
    return works


def step_s(law: StepLaw, works: Sequence[StageWork], name: str) -> float:
    """Return the planned seconds of a step."""
    ends = play(law, works, name).values()
    return law.factor * (law.overhead_s + max(end for _, end in ends))


def pace_s(law: StepLaw, works: Sequence[StageWork]) -> float:
    """Return the planned seconds of a micro-batch on the slowest resource."""
    own = law.embedding_forward_s + law.embedding_backward_s + law.submit_s
    chunks = (each.forward_s + each.backward_s for each in works)
    return law.factor * max(own, law.head_pace_s, *chunks)


def alone(law: StepLaw, works: Sequence[StageWork], name: str) -> tuple[StepLaw, list[StageWork]]:
    """Remove from measured times the waiting for cores that workers on one machine share.

    Returns the law and the works whose simulated durations are the measured ones, approximately.
    """
    own = StageWork(law.embedding_forward_s, law.embedding_backward_s, law.send_s, law.host)
    told = found = [own, *works]
    for _ in range(_FITS):
        ran = play(law, found[1:], name)
        found = [
            replace(
                each,
                forward_s=each.forward_s * _ratio(now.forward_s, ran, stage, FORWARD),
                backward_s=each.backward_s * _ratio(now.backward_s, ran, stage, BACKWARD),
                send_s=each.send_s * _ratio(now.send_s, ran, "send", stage),
            )
            for stage, (now, each) in enumerate(zip(told, found, strict=True), start=-1)
        ]
        own = found[0]
        law = replace(
            law,
            embedding_forward_s=own.forward_s,
            embedding_backward_s=own.backward_s,
            send_s=own.send_s,
        )
    return law, found[1:]


def _ratio(measured_s: float, ran: Mapping[Key, tuple[float, float]], *kind: Hashable) -> float:
    """Return the ratio of measured to simulated seconds of the jobs whose keys begin with
    ``kind``."""
    own = [key for key in ran if key[: len(kind)] == kind]
    simulated_s = fmean(ran[key][1] - ran[key][0] for key in own)
    return measured_s / simulated_s if simulated_s else 1.0
