"""Decide exactly which devices recompute: keep only the inputs of their blocks, and compute the
forward pass again before backward.

Recomputing takes time, so that a device recomputes only if what it holds does not fit otherwise.
This is branch and bound around any solver. A device that is not decided yet computes as fast as
without recomputing, and needs at most as much memory as in either way. So no plan of a node is
faster than its solver's, which is a plan itself if its undecided devices fit without recomputing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.state import DeviceProfile, MemoryBudget
from optim.latency import batch_s, block_caps, memory_cap
from optim.problem import (
    ClusterProblem,
    ClusterSolution,
    ClusterSolver,
    Ints,
    Partition,
    Stage,
)
from optim.sharing.law import row_caps, stages_of
from optim.verify.cluster import verify_cluster

_MOST_NODES = 512


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
    of nodes ended the search: it is then not ``complete``, and the certificate's bound still holds.
    Raises ``InfeasibleRoundError`` like the solver, and ``PlanViolationError``.
    """

    def solve(own: ClusterProblem) -> ClusterSolution:
        solution = solver(own, rng)
        verify_cluster(solution, own)
        return solution

    if not any(device.recomputing for device in problem.devices):
        return solve(problem)
    pending, found, reasons = [_Node()], list[Partition](), list[InfeasibleRoundError]()
    leaves, nodes, left_s = list[ClusterSolution](), 0, math.inf
    while pending:
        node = pending.pop()
        if nodes == _MOST_NODES:
            left_s = min(left_s, node.least_s)
            continue
        nodes += 1
        try:
            solution = solve(node.problem(problem))
        except InfeasibleRoundError as error:
            reasons.append(error)
            continue
        if solution.best.replicated:  # replicas never recompute
            return solve(_Node(off=frozenset(range(len(problem.devices)))).problem(problem))
        points = [replace(p, recomputing=needing(problem, p)) for p in solution.front]
        wrong = [k for p in points for k in p.recomputing if k not in node.on]
        if wrong and any(_faster_somewhere(point, found, problem) for point in points):
            pending += node.branches(wrong[0], solution.certificate.lower_bound)
            continue
        leaves.append(solution)
        found += [p for p in points if not wrong and _recomputes_only(node.on, p)]
    if not found:
        unknown = f"no plan is known after {nodes} choices of which devices recompute"
        raise reasons[-1] if reasons else InfeasibleRoundError(unknown)
    front = list[Partition]()
    for point in sorted(found, key=lambda each: (each.num_segments, each.latency_s)):
        if _faster_somewhere(point, front, problem):
            front.append(point)
    low = problem.activation_s[0]
    best = min(front, key=lambda each: batch_s(each, low))
    bounds = [left_s, *(each.certificate.lower_bound for each in leaves)]
    certificate = replace(
        leaves[0].certificate,
        objective=batch_s(best, low),
        lower_bound=min(*bounds, batch_s(best, low)),
        solve_time_s=sum(each.certificate.solve_time_s for each in leaves),
    )
    complete = math.isinf(left_s) and all(each.complete for each in leaves)
    return ClusterSolution(tuple(front), best, certificate, complete)


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


def in_modes(problem: ClusterProblem, point: Partition) -> ClusterProblem:
    """Return the problem with each device as it must compute in this plan."""
    recomputing = needing(problem, point)
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
    memory = MemoryBudget(
        limit_bytes=max(each.limit_bytes for each in both),
        segment_bytes=min(each.segment_bytes - each.batch_segment_bytes for each in both),
        block_bytes=min(each.block_bytes - each.batch_block_bytes for each in both),
        sample_bytes=min(each.sample_bytes + each.batch_block_bytes / batch_size for each in both),
        trained_bytes=min(each.trained_bytes for each in both),
    )
    sharing = device.sharing and replace(device.sharing, memory=memory)
    return replace(device, memory=memory, sharing=sharing, recomputing=None)


def _fits(problem: ClusterProblem, device: DeviceProfile, stage: Stage, rows: int, m: int) -> bool:
    members = len(stage.devices)
    if members == 1:
        return memory_cap(problem, device, m) >= stage.blocks
    return bool(row_caps(problem, device)[members - 2, m - 1, stage.blocks - 1] >= rows)


def _recomputes_only(on: frozenset[int], point: Partition) -> bool:
    """Whether all devices of ``on`` that hold blocks must recompute; else another node has the same
    blocks in less time."""
    return all(k in point.recomputing or not point.blocks[k] for k in on)


def _faster_somewhere(
    point: Partition, others: Sequence[Partition], problem: ClusterProblem
) -> bool:
    """Whether the point is faster, for some time of the uplink, than all others with no more
    segments."""
    rivals = [each for each in others if each.num_segments <= point.num_segments]
    return any(
        all(batch_s(point, time_s) < batch_s(each, time_s) for each in rivals)
        for time_s in _times(problem, [point, *rivals])
    )


def _times(problem: ClusterProblem, points: Sequence[Partition]) -> Iterator[float]:
    """Yield the times of the uplink to compare: of a range those at which a point bends."""
    *finite, last = problem.activation_s
    yield from finite
    if math.isfinite(last):
        yield last
        return
    for each in points:
        yield max(finite[-1], each.num_micro_batches * each.slowest_s)
