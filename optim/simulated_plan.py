"""Compare a cluster's plans by simulating their steps with the measured law of real devices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import TypeVar

from collapipe.state import MOST_LAW, AffineLaw, ClusterState, DeviceProfile, Link, admitted
from collapipe.step_law import DeviceTimes, HeldStage, StepLaw, interval
from optim.problem import EVERY_TIME, ClusterProblem, Partition, Stage
from optim.sharing.law import largest_rows, stages_of
from optim.sharing.modes import held_in_order, needing
from optim.step import DEFAULT, StageWork, beyond, pace_s, step_s, works_of
from optim.verified import is_possible

Hop = TypeVar("Hop", AffineLaw, Link)

_MOST_ACTIONS = 1024  # segments times micro-batches of a simulated step
_MOST_DOUBT = 0.1  # spread of predictions; a larger one would keep a wrong plan the longer
_LEAST_GAIN = 0.05  # of an earlier plan that was measured, so that plans do not take turns
MOST_SIMULATED = 2**14  # the same, of all steps that are compared for a cluster: about a second


def as_measured(problem: ClusterProblem, law: StepLaw) -> ClusterProblem:
    """Return the problem with the law's hops."""
    size = problem.batch_size / law.num_micro_batches
    devices = (
        with_hops(each, times, size) if (times := law.devices.get(each.name)) else each
        for each in problem.devices
    )
    return replace(problem, devices=tuple(devices))


def with_micro_batches(
    problem: ClusterProblem, m: int, stages: Sequence[HeldStage], most_segments: int | None = None
) -> ClusterProblem:
    """Return the problem with m micro-batches alone, because others would change the weights' last
    bits; with any number as before if memory does not allow m in ``most_segments`` segments, not
    even for these ``stages``."""
    if m > problem.max_micro_batches:
        return problem
    fixed = replace(problem, min_micro_batches=m, max_micro_batches=m)
    if held_in_order(fixed)[0][:most_segments].max() >= problem.num_blocks:
        return fixed
    return fixed if stages and _point(Partition((), m, 0.0), fixed, stages, m) else problem


def with_hops(device: DeviceProfile, times: DeviceTimes, size: float) -> DeviceProfile:
    """Return the device with hops as measured, there and back; ``size`` is b/m."""
    factor, more_s = beyond(times.send_s, device.time.hop(times.rows or size))

    def measured(hop: Hop) -> Hop:
        w, ell = factor * hop.w, factor * hop.ell + 2 * more_s
        return replace(hop, w=admitted(w, MOST_LAW), ell=admitted(ell, MOST_LAW))

    return replace(device, time=measured(device.time), links=tuple(map(measured, device.links)))


def law_for(cluster: ClusterState) -> StepLaw | None:
    """Return the law by which the cluster's steps are simulated, or None.

    None if the planner also chooses where the head trains: only one place was measured.
    """
    places = {each.head for each in cluster.uplink.payloads} if cluster.uplink else set()
    return cluster.step if cluster.real_devices and len(places) <= 1 else None


def simulates(point: Partition) -> bool:
    """Whether the point's steps are simulated. Replicas and very long steps are not."""
    return not point.replicated and _devices_of(point) * point.num_micro_batches <= _MOST_ACTIONS


def simulated(point: Partition, problem: ClusterProblem, law: StepLaw, schedule: str) -> Partition:
    """Return the point with the seconds of a simulated step, and those of its slowest stage."""
    law = law.with_micro_batches(point.num_micro_batches)
    point = replace(point, recomputing=needing(problem, point))
    works = works_in(point, problem, law)
    return replace(
        point,
        latency_s=law.expected_s(_held(point, problem), step_s(law, works, schedule), schedule),
        slowest_s=pace_s(law, works),
        fastest_s=EVERY_TIME,  # the closed law's times have another range
        bound_s=0.0 if math.isfinite(point.bound_s) else math.inf,  # and another bound
    )


def works_in(point: Partition, problem: ClusterProblem, law: StepLaw) -> list[StageWork]:
    """Return the work of each stage, in pipeline order, with the law of the point's m."""
    devices = {each.name: each for each in problem.in_modes(point.recomputing).devices}
    return works_of(law, _held(point, problem), devices, problem.batch_size)


def _held(point: Partition, problem: ClusterProblem) -> list[HeldStage]:
    stages = []
    for stage in stages_of(problem, point):
        names = tuple(problem.devices[k].name for k in stage.devices)
        stages.append(HeldStage(names, stage.blocks, stage.rows if len(names) > 1 else ()))
    return stages


def _devices_of(point: Partition) -> int:
    """Return the number of devices that hold blocks."""
    return len(point.blocks) - point.blocks.count(0)


def simulated_front(
    front: Sequence[Partition],
    problem: ClusterProblem,
    law: StepLaw,
    schedule: str,
    most_segments: int | None = None,
    shares: bool = False,
) -> list[Partition]:
    """Return the front by simulated times: of the ``front``, its neighbours and the last plan; with
    shared stages only if ``shares``.

    If the same devices are present, the last plan stays unless another one is faster by more than
    the prediction's interval; an earlier plan that was is then the one to beat. If other devices
    are present, these plans are compared without preference. Slower plans with fewer segments stay
    in the front, too.
    """
    if not all(map(simulates, front)):
        return list(front)
    best = sorted(front, key=lambda each: each.latency_s)
    most_m = max(each.num_micro_batches for each in front)
    any_m = replace(problem, min_micro_batches=1, max_micro_batches=most_m)
    near = chain(best, (each for point in best for each in _neighbours(point, any_m)))
    each_takes = max(_devices_of(each) * each.num_micro_batches for each in best)
    few = islice(near, MOST_SIMULATED // each_takes)
    compared = {(each.num_micro_batches, each.blocks, each.stages): each for each in few}
    points = [simulated(each, problem, law, schedule) for each in compared.values()]
    few_enough = (
        simulated(each, problem, law, schedule)
        for each in _measured(front[0], problem, law)
        if (most_segments is None or each.num_segments <= most_segments)
        and (shares or not each.shares)
    )
    if {device.name for device in problem.devices} != {*law.present}:
        points += few_enough
    elif (stays := next(few_enough, None)) is not None:
        gain = max(_LEAST_GAIN, min(law.spread, _MOST_DOUBT))
        for known in few_enough:
            if known.latency_s < (1 - gain) * stays.latency_s:
                stays = known
        points = [stays, *(each for each in points if not as_good(each, stays, law))]
    return _descending(points)


def of_schedules(fronts: Mapping[str, Sequence[Partition]], law: StepLaw) -> list[Partition]:
    """Return the front of all schedules. The last round's schedule stays unless a plan with another
    one is faster by more than the prediction's interval."""
    last = law.measured[0].schedule if law.measured else DEFAULT
    known = fronts.get(last, ())
    best_s = min((each.latency_s for each in known), default=math.inf)
    least_s = interval(best_s, min(law.spread, _MOST_DOUBT))[0]
    others = (each for name, front in fronts.items() if name != last for each in front)
    return _descending([*known, *(each for each in others if each.latency_s < least_s)])


def _descending(points: Sequence[Partition]) -> list[Partition]:
    """Return the points that are faster than all with no more segments, by segments."""
    kept = list[Partition]()
    for point in sorted(points, key=lambda each: (each.num_segments, each.latency_s)):
        if not kept or point.latency_s < kept[-1].latency_s:
            kept = [each for each in kept if each.num_segments < point.num_segments]
            kept.append(point)
    return kept


def as_good(point: Partition, known: Partition, law: StepLaw) -> bool:
    """Whether a point is not slower than a measured one, but not faster by more than the interval
    of predictions.

    If stages are shared this is one deviation of new plans: their gain is large, and a round tells
    whether it is real.
    """
    shared = point.shares or known.shares
    doubt = law.spread_of_new / 2 if shared else min(law.spread, _MOST_DOUBT)
    return interval(known.latency_s, doubt)[0] <= point.latency_s <= known.latency_s


def _measured(like: Partition, problem: ClusterProblem, law: StepLaw) -> Iterator[Partition]:
    """Yield the plan of the last round and those before it that are possible now."""
    plans = ((each.stages, each.num_micro_batches) for each in law.measured[1:])
    for stages, m in ((law.stages, law.num_micro_batches), *plans):
        if (point := _point(like, problem, stages, m)) is not None:
            yield point


def _point(
    like: Partition, problem: ClusterProblem, stages: Sequence[HeldStage], m: int
) -> Partition | None:
    """Return the partition with these stages, or None if it is not possible."""
    places = {device.name: place for place, device in enumerate(problem.devices)}
    blocks = {name: each.blocks for each in stages for name in each.devices}
    within = problem.min_micro_batches <= m <= problem.max_micro_batches
    whole = sum(each.blocks for each in stages) == problem.num_blocks
    if not (within and whole and blocks.keys() <= places.keys()):
        return None  # of another run
    held = tuple(blocks.get(name, 0) for name in places)
    point = replace(like, blocks=held, num_micro_batches=m, stages=())
    rows = largest_rows(problem, m)
    order = tuple(
        Stage(tuple(map(places.__getitem__, e.devices)), e.rows or (rows,), e.blocks)
        for e in stages
    )
    if order != stages_of(problem, point):
        point = replace(point, stages=order)
    return point if _fits(point, problem) and simulates(point) else None


def _fits(point: Partition, problem: ClusterProblem) -> bool:
    """Whether the devices can hold the point's stages in their order."""
    return is_possible(problem.in_modes(needing(problem, point)), point)


def _neighbours(point: Partition, problem: ClusterProblem) -> Iterator[Partition]:
    """Yield the points in which one block is on the segment before or after its own; none for
    plans with shared stages."""
    stages = () if point.shares else stages_of(problem, point)
    for pair in pairwise(range(len(stages))):
        for source, sink in (pair, reversed(pair)):
            moved, blocks = list(stages), list(point.blocks)
            for place, more in ((source, -1), (sink, 1)):
                moved[place] = replace(stages[place], blocks=stages[place].blocks + more)
                blocks[moved[place].devices[0]] += more
            order = tuple(moved) if point.stages else ()
            near = replace(point, blocks=tuple(blocks), stages=order)
            if moved[source].blocks and _fits(near, problem):
                yield near
