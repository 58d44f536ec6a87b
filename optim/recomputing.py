"""Decide which devices recompute: keep only the inputs of their blocks, and compute their forward
pass again before backward.

Recomputing takes time, so that a device recomputes only if what it holds does not fit otherwise.
Plans in which no device recomputes, and in which all may, are the first candidates; branch and
bound around an exact solver finds better ones. A device that is not decided yet computes as fast as
without recomputing, and needs at most as much memory as in either way. So no plan of a node is
faster than its solver's.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError, PlanViolationError
from collapipe.plan import Certificate
from collapipe.state import MOST, DeviceProfile, MemoryBudget, admitted
from optim.latency import batch_s, block_caps, memory_cap, partition_of
from optim.problem import (
    ClusterProblem,
    ClusterSolution,
    ClusterSolver,
    Ints,
    Partition,
    Stage,
)
from optim.sharing.law import row_caps, sharing_partition, stages_of
from optim.verify.cluster import check_point, verify_cluster

_MOST_SOLVED = 400  # problems of a search, times devices: about a second


@dataclass(frozen=True, slots=True)
class _Node:
    """Decided devices: those that recompute (``on``), and those that do not (``off``)."""

    on: frozenset[int] = frozenset()
    off: frozenset[int] = frozenset()
    least_s: float = 0.0  # lower bound of all its plans

    def problem(self, whole: ClusterProblem) -> ClusterProblem:
        def device(k: int, profile: DeviceProfile) -> DeviceProfile:
            if k in self.on or k in self.off or profile.recomputing is None:
                return profile.in_mode(k in self.on)
            return _undecided(profile, whole.batch_size)

        devices = tuple(device(k, each) for k, each in enumerate(whole.devices))
        return replace(whole, devices=devices)

    def branches(self, k: int, least_s: float) -> "list[_Node]":
        return [_Node(self.on | {k}, self.off, least_s), _Node(self.on, self.off | {k}, least_s)]


def solve_verified(
    problem: ClusterProblem, solver: ClusterSolver, rng: np.random.Generator
) -> ClusterSolution:
    """Return the verified solution of ``problem``, in which each device recomputes or not if its
    profile has the choice.

    ``solver`` solves problems without this choice. If it is exact, so is the front, unless a limit
    of nodes ended the search: it is then not ``complete``, but the certificate's bound holds. Rules
    without a bound only plan for no device that recomputes, and for all.
    Raises ``InfeasibleRoundError`` like the solver, and ``PlanViolationError``.
    """
    before, started = rng.bit_generator.state, perf_counter()

    def solve(own: ClusterProblem) -> ClusterSolution:
        rng.bit_generator.state = before
        solution = solver(own, rng)
        verify_cluster(solution, own)
        return solution

    may = frozenset(k for k, device in enumerate(problem.devices) if device.recomputing)
    if not may:
        return solve(problem)
    ends, reasons = list[ClusterSolution](), list[InfeasibleRoundError]()
    for node in (_Node(off=may), _Node(on=may)):
        try:
            ends.append(solve(node.problem(problem)))
        except InfeasibleRoundError as error:
            reasons.append(error)
        if ends and ends[0].best.replicated:  # replicas do not recompute
            if reasons:
                raise reasons[0]
            return ends[0]
    found = [each for end in ends for each in _possible(end.front, problem)]
    bound_s, complete = 0.0, True
    if not ends or any(end.certificate.lower_bound for end in ends):
        bound_s, complete = _search(problem, solve, found)
    if not found:
        raise reasons[-1]
    front, low = _front(found, problem), problem.activation_s[0]
    best = min(front, key=lambda each: batch_s(each, low))
    best_s, name = batch_s(best, low), ends[0].certificate.solver if ends else "exact"
    certificate = Certificate(best_s, min(bound_s, best_s), name, perf_counter() - started)
    return ClusterSolution(front, best, certificate, complete)


def _search(
    problem: ClusterProblem,
    solve: Callable[[ClusterProblem], ClusterSolution],
    found: list[Partition],
) -> tuple[float, bool]:
    """Add better plans to ``found`` by branch and bound. Return a lower bound of all plans, and
    whether no limit ended the search."""
    pending, bounds, whole = [_Node()], [math.inf], True
    for _ in range(max(2, _MOST_SOLVED // len(problem.devices))):
        if not pending:
            break
        node = pending.pop()
        try:
            solution = solve(node.problem(problem))
        except InfeasibleRoundError:
            continue
        least_s, whole = solution.certificate.lower_bound, whole and solution.complete
        wrong = [k for point in solution.front for k in needing(problem, point) if k not in node.on]
        better = any(_faster_somewhere(point, found, problem) for point in solution.front)
        found += _possible(solution.front, problem)
        if wrong and better:
            pending += node.branches(wrong[0], least_s)
        else:
            bounds.append(least_s)
    bounds += [node.least_s for node in pending]
    return min(bounds), whole and not pending


def _possible(front: Sequence[Partition], problem: ClusterProblem) -> list[Partition]:
    """Return the points that are plans if those devices recompute that must, with their times."""
    plans = []
    for point in front:
        recomputing, m = needing(problem, point), point.num_micro_batches
        own = in_modes(problem, recomputing)
        plan = (
            sharing_partition(own, point.stages, m)
            if point.stages
            else partition_of(own, point.blocks, m)
        )
        try:
            check_point(plan, own)
        except PlanViolationError:
            continue
        plans.append(replace(plan, recomputing=recomputing))
    return plans


def _front(plans: Sequence[Partition], problem: ClusterProblem) -> tuple[Partition, ...]:
    """Return the plans, by segments, without those that others make superfluous."""
    front = list[Partition]()
    for plan in sorted(dict.fromkeys(plans), key=lambda each: (each.num_segments, each.latency_s)):
        if _faster_somewhere(plan, front, problem):
            front.append(plan)
    return tuple(front)


def needing(problem: ClusterProblem, point: Partition) -> tuple[int, ...]:
    """Return the devices that must recompute, because what they hold does not fit otherwise."""
    if point.replicated:
        return ()
    m, found = point.num_micro_batches, []
    for stage in stages_of(problem, point):
        for k, rows in zip(stage.devices, stage.rows, strict=True):
            own = problem.devices[k]
            if own.recomputing and not _fits(problem, own.in_mode(False), stage, rows, m):
                found.append(k)
    return tuple(sorted(found))


def in_modes(problem: ClusterProblem, recomputing: Collection[int]) -> ClusterProblem:
    """Return the problem in which these devices recompute, and no others."""
    devices = enumerate(problem.devices)
    return replace(problem, devices=tuple(each.in_mode(k in recomputing) for k, each in devices))


def either_caps(problem: ClusterProblem) -> Ints:
    """Return the most blocks of each device, [M, K], recomputing or not; see ``block_caps``."""
    caps = (
        block_caps(replace(problem, devices=tuple(each.in_mode(mode) for each in problem.devices)))
        for mode in (False, True)
    )
    return np.maximum(*caps)


def _undecided(device: DeviceProfile, batch_size: int) -> DeviceProfile:
    """Return the profile with a memory that is enough in either way for no fewer blocks.

    A device keeps at least the tensors of one micro-batch of its rows at the same time.
    """
    assert device.memory is not None and device.recomputing is not None
    both = device.memory, device.recomputing.memory

    def least(amounts: Iterable[float]) -> float:
        return admitted(min(amounts), MOST)

    memory = MemoryBudget(
        limit_bytes=device.memory.limit_bytes,
        segment_bytes=least(each.segment_bytes - each.batch_segment_bytes for each in both),
        block_bytes=least(each.block_bytes - each.batch_block_bytes for each in both),
        sample_bytes=least(e.sample_bytes + e.batch_block_bytes / batch_size for e in both),
        trained_bytes=least(each.trained_bytes for each in both),
    )
    sharing = device.sharing and replace(device.sharing, memory=memory)
    return replace(device, memory=memory, sharing=sharing, recomputing=None)


def _fits(problem: ClusterProblem, device: DeviceProfile, stage: Stage, rows: int, m: int) -> bool:
    members = len(stage.devices)
    if members == 1:
        return memory_cap(problem, device, m) >= stage.blocks
    return bool(row_caps(problem, device)[members - 2, m - 1, stage.blocks - 1] >= rows)


def _faster_somewhere(
    point: Partition, others: Sequence[Partition], problem: ClusterProblem
) -> bool:
    """Whether the point is faster, for some time of the uplink, than all others with no more
    segments."""
    *times, last = problem.activation_s
    if math.isinf(last):  # it may be faster only between the times at which points bend
        return True
    rivals = [each for each in others if each.num_segments <= point.num_segments]
    return any(
        all(batch_s(point, time_s) < batch_s(each, time_s) for each in rivals)
        for time_s in (*times, last)
    )
