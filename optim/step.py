"""Simulate a step on real devices: processors, links, the control unit and the head as resources.

The closed laws in ``optim.latency`` find candidates; this simulation compares and predicts them.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, islice, pairwise
from statistics import fmean

from collapipe.errors import ConfigError
from collapipe.row_shares import connected
from collapipe.state import AffineLaw, DeviceProfile, ring_s
from collapipe.step_law import FORWARD_SHARE, DeviceTimes, HeldStage, StepLaw
from optim.jobs import Job, Key, Worker, simulate
from pipeline import schedule
from pipeline.schedule import BACKWARD, FORWARD

DEFAULT, _AUTO = "one_f_one_b", "auto"  # schedules
_MANY = 256  # micro-batches
_FITS = 5  # simulations until the works explain the measured times


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The work of a device in a micro-batch: seconds of its blocks on a core of its own, and of
    sending an output. ``host`` is its machine; None: not shared with others."""

    forward_s: float
    backward_s: float
    send_s: float
    host: str | None
    back_s: float | None = None  # of sending a gradient; None: as ``send_s``


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of each device of a stage, and the seconds in which they add their gradients after
    the last micro-batch. ``rows`` are the planned rows of each device, of which one has all."""

    devices: tuple[DeviceWork, ...]
    sync_s: float = 0.0
    rows: tuple[int, ...] = (1,)


def play(law: StepLaw, works: Sequence[StageWork], name: str) -> dict[Key, tuple[float, float]]:
    """Simulate a step of the schedule ``name`` on stages in pipeline order.

    Keys are (device, kind, micro-batch), with the devices numbered from 0 on in pipeline order;
    device -1 is the embedding, and the number of devices is the head's. The head's backward is the
    time at which the control unit has the answer.
    """
    stages, m = _numbered(works), law.num_micro_batches
    (last,) = stages[-1]
    lists = schedule.build(name, len(works), m)
    jobs = dict(_jobs(law, stages, works))
    own = [(-1, each.kind, each.micro_batch) for each in schedule.embedding(name, len(works), m)]
    heads = [[(last, kind, i) for i in range(m)] for kind in (BACKWARD, FORWARD)]
    workers = [Worker((*heads, own), law.host), Worker(([("head", i) for i in range(m)],))]
    for numbers, work, actions in zip(stages[1:], works, lists, strict=False):
        for number, device in zip(numbers, work.devices, strict=True):
            order = [(number, each.kind, each.micro_batch) for each in actions]
            workers.append(Worker((order,), device.host))
    of_stages = ({each.host for each in work.devices} for work in works)
    hosts: list[set[str | None]] = [{law.host}, *of_stages, {law.host}]
    for place, (before, after) in enumerate(pairwise(hosts)):
        both = before | after
        host = next(iter(both)) if len(both) == 1 else None  # a network needs no processors
        for kind, numbers in ((FORWARD, stages[place]), (BACKWARD, stages[place + 1])):
            for number in numbers:
                lane = [("send", number, kind, i) for i in range(m)]
                workers.append(Worker((lane,), host))
    workers += [Worker(([("sync", stage)],)) for stage in range(len(works))]
    delay_s = law.head_s - law.head_pace_s  # answers of several micro-batches may be on their way
    ways = max(1, min(m, math.ceil(delay_s / law.head_pace_s))) if law.head_pace_s else m
    workers += [Worker(([("answer", i) for i in range(way, m, ways)],)) for way in range(ways)]
    return simulate(jobs, workers, law.cores)


def _numbered(works: Sequence[StageWork]) -> list[list[int]]:
    """Return the numbers of the embedding, of each stage's devices, and of the head."""
    ends = accumulate((len(work.devices) for work in works), initial=0)
    stages = [list(range(a, b)) for a, b in pairwise(ends)]
    return [[-1], *stages, [sum(map(len, stages))]]


def _jobs(
    law: StepLaw, stages: Sequence[Sequence[int]], works: Sequence[StageWork]
) -> Iterator[tuple[Key, Job]]:
    (last,) = stages[-1]
    devices = [each for work in works for each in work.devices]
    rows = [(1,), *(work.rows for work in works), (1,)]
    sources = defaultdict[tuple[str, int], list[int]](list)
    for (before, after), own in zip(pairwise(stages), pairwise(rows), strict=True):
        for a, b in connected(*own):
            sources[FORWARD, after[b]].append(before[a])
            sources[BACKWARD, before[a]].append(after[b])
    returns = law.embedding_backward_s > 0
    for i in range(law.num_micro_batches):
        yield (-1, FORWARD, i), Job(law.embedding_forward_s)
        yield ("send", -1, FORWARD, i), Job(law.send_s, ((-1, FORWARD, i),))
        yield (last, BACKWARD, i), Job(0.0, (("answer", i),))
        yield ("send", last, BACKWARD, i), Job(law.send_s, ((last, BACKWARD, i),))
        for number, device in enumerate(devices):
            yield ("send", number, FORWARD, i), Job(device.send_s, ((number, FORWARD, i),))
            back_s = device.send_s if device.back_s is None else device.back_s
            send_s = back_s if returns or number not in stages[1] else 0.0
            yield ("send", number, BACKWARD, i), Job(send_s, ((number, BACKWARD, i),))
        for (kind, sink), each in sources.items():
            inputs = tuple(("send", source, kind, i) for source in each)
            yield (sink, kind, i), Job(_action_s(law, devices, sink, kind), inputs)
        yield ("head", i), Job(law.head_pace_s, ((last, FORWARD, i),))
        yield ("answer", i), Job(max(0.0, law.head_s - law.head_pace_s), (("head", i),))
    for stage, work in enumerate(works):
        done = ((each, BACKWARD, law.num_micro_batches - 1) for each in stages[stage + 1])
        yield ("sync", stage), Job(work.sync_s, tuple(done))


def _action_s(law: StepLaw, devices: Sequence[DeviceWork], number: int, kind: str) -> float:
    """Return the seconds of an action: of the embedding's backward, the head's forward, or a
    device's."""
    if number == -1:
        return law.embedding_backward_s
    if number == len(devices):
        return law.submit_s
    return devices[number].forward_s if kind == FORWARD else devices[number].backward_s


def works_of(
    law: StepLaw,
    stages: Sequence[HeldStage],
    devices: Mapping[str, DeviceProfile],
    batch_size: float,
) -> list[StageWork]:
    """Return the work of stages on ``devices``, whose profiles have the measured speeds. A device
    without measurements is like the mean of the others, on a machine of its own."""
    known = law.devices.values()
    like = DeviceTimes(
        fmean(each.forward_share for each in known) if known else FORWARD_SHARE,
        fmean(each.send_s for each in known) if known else law.send_s,
        host="",
    )
    works, to = [], ways(stages, devices)
    for stage in stages:
        found, size = [], batch_size / law.num_micro_batches
        for name, rows in stage.rows_of(size):
            own, times = devices[name].time, law.devices.get(name, like)
            seconds = own.compute(stage.blocks, rows)
            forward_s = times.forward_share * seconds
            sent_s = own.hop(times.rows or size)
            send_s, back_s = (like_hop(times.send_s, sent_s, way.hop(rows)) for way in to[name])
            host = times.host if name in law.devices else None
            found.append(DeviceWork(forward_s, seconds - forward_s, send_s, host, back_s))
        sync_s = syncs_s(stage, devices)
        if law.sync_slowness is None and stage.rows:  # gradients and weights are hops, too
            sync_s += 2 * max(each.send_s for each in found)
        works.append(StageWork(tuple(found), sync_s, stage.rows or (1,)))
    return works


def syncs_s(stage: HeldStage, devices: Mapping[str, DeviceProfile]) -> float:
    """Return the seconds in which a stage's devices add their gradients."""
    own = (devices[name].before((), members=stage.devices) for name in stage.devices)
    return ring_s([each.sharing for each in own], stage.blocks)


def schedules(requested: str, measured: bool) -> tuple[str, ...]:
    """Return the schedules to compare for the ``requested`` one, which may be ``auto``.

    Closed laws have the same time for all, so that only a ``measured`` cluster has a choice.
    """
    if requested != _AUTO:
        return (requested,)
    return tuple(schedule.SCHEDULES) if measured else (DEFAULT,)


@cache
def in_flight(name: str, num_devices: int) -> tuple[int, ...]:
    """Return of how many micro-batches a device keeps tensors at most with the schedule ``name``,
    by its place from the end of the pipeline; (): of all micro-batches.

    Raises ``ConfigError`` if a device keeps some of them, but more of more.
    """
    m, more = num_devices + 2, num_devices + _MANY
    counts = schedule.kept(name, num_devices, m)[::-1]
    if counts[-1] == m:
        return ()
    for few, many in zip(counts, schedule.kept(name, num_devices, more)[::-1], strict=True):
        if few != many:
            raise ConfigError(
                f"pipeline.schedule={name}: a segment keeps {few} of {m} micro-batches, but {many} "
                f"of {more}; it must keep all, or a constant number; choose another schedule"
            )
    return counts


def ways(
    stages: Sequence[HeldStage], devices: Mapping[str, DeviceProfile]
) -> dict[str, tuple[AffineLaw, AffineLaw]]:
    """Return each device's time if it sends to the stage after its own, and to the one before."""
    ahead, back = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for stage, following in pairwise(stages):
        for a, b in connected(stage.rows or (1,), following.rows or (1,)):
            ahead[stage.devices[a]].append(following.devices[b])
            back[following.devices[b]].append(stage.devices[a])
    names = (name for stage in stages for name in stage.devices)
    return {k: (devices[k].time_to(ahead[k]), devices[k].time_to(back[k])) for k in names}


def like_hop(send_s: float, described_s: float, other_s: float) -> float:
    """Return the seconds of sending a hop that the inventory describes as ``other_s``, there and
    back, if sending another one took ``send_s``.

    What a hop takes beyond its bytes, wake-ups above all, is the same for all hops; but if it was
    faster than described, others are, too.
    """
    factor, more_s = beyond(send_s, described_s)
    return factor * other_s / 2 + more_s


def beyond(send_s: float, described_s: float) -> tuple[float, float]:
    """Return what sending takes of half the described seconds, at most 1, and what it takes more,
    in seconds."""
    usual_s = described_s / 2
    return (send_s / usual_s, 0.0) if send_s < usual_s else (1.0, send_s - usual_s)


def step_s(law: StepLaw, works: Sequence[StageWork], name: str) -> float:
    """Return the planned seconds of a step."""
    ends = play(law, works, name).values()
    return law.factor * (law.overhead_s + max(end for _, end in ends))


def pace_s(law: StepLaw, works: Sequence[StageWork]) -> float:
    """Return the planned seconds of a micro-batch on the slowest resource."""
    own = law.embedding_forward_s + law.embedding_backward_s + law.submit_s
    chunks = (each.forward_s + each.backward_s for work in works for each in work.devices)
    return law.factor * max(own, law.head_pace_s, *chunks)


def alone(law: StepLaw, works: Sequence[StageWork], name: str) -> tuple[StepLaw, list[StageWork]]:
    """Remove from measured times the waiting for cores that workers on one machine share.

    Returns the law and the works whose simulated durations are the measured ones, approximately.
    """
    own = DeviceWork(law.embedding_forward_s, law.embedding_backward_s, law.send_s, law.host)
    measured = devices = [own, *(each for work in works for each in work.devices)]
    stages = list(works)
    for _ in range(_FITS):
        ran = play(law, stages, name)
        devices = [
            replace(
                each,
                forward_s=each.forward_s * _ratio(now.forward_s, ran, number, FORWARD),
                backward_s=each.backward_s * _ratio(now.backward_s, ran, number, BACKWARD),
                send_s=each.send_s * _ratio(now.send_s, ran, "send", number),
            )
            for number, (now, each) in enumerate(zip(measured, devices, strict=True), start=-1)
        ]
        own, left = devices[0], iter(devices[1:])
        stages = [replace(work, devices=tuple(islice(left, len(work.devices)))) for work in works]
        law = replace(
            law,
            embedding_forward_s=own.forward_s,
            embedding_backward_s=own.backward_s,
            send_s=own.send_s,
        )
    return law, stages


def _ratio(measured_s: float, ran: Mapping[Key, tuple[float, float]], *kind: Hashable) -> float:
    """Return the ratio of measured to simulated seconds of the jobs whose keys begin with
    ``kind``."""
    ends = (each for key, each in ran.items() if key[: len(kind)] == kind)
    simulated = [end_s - began_s for began_s, end_s in ends if end_s > began_s]
    return measured_s / fmean(simulated) if simulated else 1.0  # an output that nobody needs: 0 s
