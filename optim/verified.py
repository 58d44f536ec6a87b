"""Solve a cluster's problem and verify the answer, whatever devices may choose.

What a device can hold may depend on its place in the pipeline, and on whether it recomputes. Then a
relaxed problem is solved first, in which every device is the last one, with the time of a device
that does not recompute and the smaller memory of both ways. If its plans are possible in some
order, no plan is faster. Else ``placed_partition`` decides places and modes exactly. The same holds
for links: in the relaxed problem each device has its fastest hop.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from time import perf_counter

import numpy as np

from collapipe.errors import InfeasibleRoundError, PlanViolationError, UnfinishedSearchError
from collapipe.plan import Certificate
from collapipe.state import ROUNDING
from optim.latency import batch_s
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, ClusterSolution, ClusterSolver, Partition, Stage
from optim.sharing.caps import Caps
from optim.sharing.exact import placed_partition, shared_partition
from optim.sharing.law import stages_of
from optim.sharing.modes import (
    decided,
    either_caps,
    fits,
    held_in_order,
    no_plan,
    relaxed,
    with_hops,
)
from optim.sharing.states import kinds_of
from optim.verify.cluster import check_plan, check_point, verify_cluster
from optim.verify.tolerance import violation
from optim.verify.witness import is_small, witness_of

_EXACT = exact_partition, shared_partition


def solve_verified(
    problem: ClusterProblem, solver: ClusterSolver, rng: np.random.Generator
) -> ClusterSolution:
    """Return the verified solution of ``problem``, in which each device recomputes or not if its
    profile has the choice.

    If ``solver`` is exact, so is the front, unless a limit of nodes or devices ended the search: it
    is then not ``complete``, but the certificate's bound holds. Rules without a bound count every
    device as the first of all, and only plan for no device that recomputes, and for all.
    Raises ``InfeasibleRoundError`` like the solver, and ``PlanViolationError``.
    """
    before, most = rng.bit_generator.state, min(len(problem.devices), problem.num_blocks)
    problem = replace(problem, in_flight=problem.in_flight[:most])  # no more stages than ``most``

    def solve(own: ClusterProblem) -> ClusterSolution:
        rng.bit_generator.state = before
        solution = solver(own, rng)
        verify_cluster(solution, own)
        return solution

    rule = rule_of(solver)
    exact, may = rule in _EXACT, any(device.recomputing for device in problem.devices)
    if not may and not problem.linked and not (exact and _by_place(problem)):
        return solve(problem)
    if exact:
        nodes = getattr(solver, "keywords", {}).get("max_nodes", math.inf)
        return _decided(problem, solve, rule is shared_partition, nodes)
    found = _for_all_or_none(problem, solve)
    if found[0].best.replicated:
        return found[0]
    plans = [plan for each in found for plan in _possible(each.front, problem)]
    return _answer(problem, plans, found[0].certificate)


def rule_of(solver: ClusterSolver) -> object:
    """Return the solver's function without its options."""
    return getattr(solver, "func", solver)


def witnessed(problem: ClusterProblem, solution: ClusterSolution) -> ClusterSolution:
    """Return an exact solution of a small problem with a witness of its bound.

    If places, links or recomputing matter, there may be none. Raises ``PlanViolationError`` if the
    bound cannot be proved though they do not.
    """
    certificate, shared = solution.certificate, solution.certificate.solver == "shared"
    if certificate.solver not in ("exact", "shared") or not is_small(problem, shared):
        return solution
    witness = witness_of(problem, certificate.lower_bound, shared)
    if witness is None:
        chosen = problem.linked or any(device.recomputing for device in problem.devices)
        if not (chosen or _by_place(problem)):
            raise violation("lower bound", f"{certificate.lower_bound:.12g} s is not proved")
        return solution
    return replace(solution, certificate=replace(certificate, witness=witness))


def is_possible(problem: ClusterProblem, point: Partition) -> bool:
    """Whether a partition is within the limits of its devices."""
    with suppress(PlanViolationError):
        check_point(point, problem)
        return True
    return False


def _for_all_or_none(
    problem: ClusterProblem, solve: Callable[[ClusterProblem], ClusterSolution]
) -> list[ClusterSolution]:
    """Return the solutions for no device that recomputes and for all devices, as far as there are
    any; replicas do not recompute. Hops take their usual time and the most joules of any hop.
    Raises ``InfeasibleRoundError`` if there is none."""
    both = zip(problem.devices, with_hops(problem, max).devices, strict=True)
    devices = (replace(usual, energy=most.energy, links=()) for usual, most in both)
    problem = replace(problem, devices=tuple(devices))
    found, reasons = list[ClusterSolution](), list[InfeasibleRoundError]()
    may = [k for k, device in enumerate(problem.devices) if device.recomputing]
    for on in ([], may) if may else ([],):
        try:
            solution = solve(problem.in_modes(on))
        except InfeasibleRoundError as error:
            reasons.append(error)
            continue
        if not (solution.best.replicated and on):
            found.append(solution)
    if not found:
        raise reasons[-1]
    return found


def _decided(
    problem: ClusterProblem,
    solve: Callable[[ClusterProblem], ClusterSolution],
    shares: bool,
    nodes: float,
) -> ClusterSolution:
    """Return the exact solution, with shared stages or for each number of single devices."""
    kinds = kinds_of(problem.devices)
    last, first = (Caps.of([each], kinds) for each in (problem.at(1), problem))
    if last.same(first) and not first.chosen and not problem.linked:
        return solve(problem.in_modes(()))
    started, loose = perf_counter(), solve(relaxed(problem))
    known = _possible(loose.front, problem)
    rounding = ROUNDING if problem.linked else 0.0  # which the order of stages changes
    found_s, least_s = ([each.latency_s for each in plans] for plans in (known, loose.front))
    if len(known) == len(least_s) and np.allclose(found_s, least_s, rtol=rounding, atol=0.0):
        return replace(loose, front=tuple(known), best=known[loose.front.index(loose.best)])
    with suppress(InfeasibleRoundError):
        ends = _for_all_or_none(problem, solve)
        known += (plan for each in ends for plan in _possible(each.front, problem))
    own = problem if shares else _without_sharing(problem)
    placed = placed_partition(own, known, nodes, by_segments=not shares)
    certificate, front = loose.certificate, tuple(known)
    if placed:
        bound_s = max(certificate.lower_bound, placed.certificate.lower_bound)
        certificate, front = replace(certificate, lower_bound=bound_s), placed.front
    elif not known:
        front = tuple(_of_some(own, nodes))
    elif problem.linked:
        fastest = min(known, key=lambda each: each.latency_s)
        front += (*_of_fewer(problem, fastest, lambda few: _decided(few, solve, shares, nodes)),)
    certificate = replace(certificate, solve_time_s=perf_counter() - started)
    return _answer(problem, front, certificate, complete=placed is not None and placed.complete)


def _of_fewer(
    problem: ClusterProblem,
    fastest: Partition,
    decide: Callable[[ClusterProblem], ClusterSolution],
) -> Iterator[Partition]:
    """Yield plans of fewer devices: those of the ``fastest`` plan, and those near each device."""
    everyone, used_now = range(len(problem.devices)), np.flatnonzero(fastest.blocks).tolist()
    for used in sorted({tuple(used_now), *_near_devices(problem)} - {tuple(everyone)}):
        with suppress(InfeasibleRoundError):
            for point in decide(problem.only(used)).front:
                yield point.among(used, len(everyone))


def _of_some(problem: ClusterProblem, nodes: float) -> list[Partition]:
    """Return plans of those devices that hold most, as many as ``placed_partition`` takes. Raises
    ``InfeasibleRoundError`` if it finds none."""
    most, num_devices = either_caps(problem.at(1)).max(axis=0), len(problem.devices)
    for count in range(num_devices - 1, 0, -1):
        used = sorted(np.argsort(-most, kind="stable")[:count].tolist())
        try:
            placed = placed_partition(problem.only(used), max_nodes=nodes)
            if placed is not None:
                return [point.among(used, num_devices) for point in placed.front]
        except InfeasibleRoundError as error:
            if held_in_order(problem)[0].max() < problem.num_blocks:
                raise no_plan(problem) from error
            raise UnfinishedSearchError(
                f"{num_devices} devices are too many to try all orders; the {count} that hold most "
                f"blocks: {error}"
            ) from error
    raise no_plan(problem)


def _near_devices(problem: ClusterProblem) -> Iterator[tuple[int, ...]]:
    """Yield, for each device, those to which its hop is not slower than its usual one."""
    for own in problem.devices:
        hops = [own.time_to([each.name]).hop(problem.batch_size) for each in problem.devices]
        usual_s = own.time.hop(problem.batch_size)
        yield tuple(k for k, hop_s in enumerate(hops) if hop_s <= usual_s)


def _answer(
    problem: ClusterProblem,
    plans: Sequence[Partition],
    certificate: Certificate,
    complete: bool = True,
) -> ClusterSolution:
    """Return the verified front of these plans; the certificate is adapted to the best one."""
    front, low = _front(plans, problem), problem.activation_s[0]
    for point in front:
        check_plan(point, problem)
    best = min(front, key=lambda each: batch_s(each, low))
    best_s = batch_s(best, low)
    bound_s = min(certificate.lower_bound, best_s)
    certificate = replace(certificate, objective=best_s, lower_bound=bound_s)
    return ClusterSolution(front, best, certificate, complete)


def _by_place(problem: ClusterProblem) -> bool:
    """Whether what a device can hold may depend on its place."""
    limits = (each for d in problem.devices for each in (d.memory, d.sharing and d.sharing.memory))
    kept = (each.batch_block_bytes + each.batch_segment_bytes for each in limits if each)
    return len(problem.in_flight) > 1 and any(kept)


def _without_sharing(problem: ClusterProblem) -> ClusterProblem:
    return replace(problem, devices=tuple(replace(d, sharing=None) for d in problem.devices))


def _possible(front: Sequence[Partition], problem: ClusterProblem) -> list[Partition]:
    """Return the points that are plans in some order, if those devices recompute that must, with
    their times. With links each has the fastest of some orders."""
    plans = []
    for point in front:
        m, stages = point.num_micro_batches, stages_of(problem, point)
        found = _of_orders(problem, [stages, _by_reach(problem, stages, m)], m)
        plan = next(found, None)
        if problem.linked:
            others = _of_orders(problem, _by_hops(problem, stages, m), m)
            plan = min(
                filter(None, (plan, *found, *others)), key=lambda each: each.latency_s, default=None
            )
        if plan is not None:
            kept = plan.latency_s == point.latency_s  # else its range of uplink times differs
            plans.append(replace(plan, fastest_s=point.fastest_s) if kept else plan)
    return plans


def _of_orders(
    problem: ClusterProblem, orders: Iterable[Sequence[Stage]], m: int
) -> Iterator[Partition]:
    """Yield the plans with stages in these orders that are possible."""
    for order in orders:
        plan = decided(problem, order, m)
        with suppress(PlanViolationError):
            check_plan(plan, problem)
            yield plan


def _by_hops(problem: ClusterProblem, stages: Sequence[Stage], m: int) -> Iterator[list[Stage]]:
    """Yield an order from each stage on, in which the next stage is always the one with the fastest
    hop."""
    size, devices = problem.batch_size / m, problem.devices

    def hop_s(stage: Stage, following: Stage) -> float:
        names = [devices[k].name for k in following.devices]
        return max(devices[k].time_to(names).hop(size) for k in stage.devices)

    hops = {(a, b): hop_s(a, b) for a in stages for b in stages}
    for first in stages:
        order, left = [first], [each for each in stages if each != first]
        while left:
            order.append(min(left, key=lambda each: hops[order[-1], each]))
            left.remove(order[-1])
        yield order


def _by_reach(problem: ClusterProblem, stages: Sequence[Stage], m: int) -> list[Stage]:
    """Return the stages in an order in which they fit if they fit in any: those that fit only near
    the end of the pipeline come last, and of others those that must recompute earlier."""

    def places(stage: Stage, ways: tuple[bool, ...]) -> int:
        """Return at how many places, from the end, each device holds the stage in one of these
        ways: recomputing or not."""

        def held(place: int, k: int) -> bool:
            return any(fits(problem, stage, k, m, place, on) for on in ways)

        every = range(1, len(stages) + 1)
        return sum(all(held(place, k) for k in stage.devices) for place in every)

    def reach(stage: Stage) -> tuple[int, int]:
        return places(stage, (False, True)), places(stage, (False,))

    return sorted(stages, key=reach, reverse=True)


def _front(plans: Sequence[Partition], problem: ClusterProblem) -> tuple[Partition, ...]:
    """Return the plans, by segments, without those that others make superfluous."""
    front = list[Partition]()
    for plan in sorted(dict.fromkeys(plans), key=lambda each: (each.num_segments, each.latency_s)):
        if _faster_somewhere(plan, front, problem):
            front.append(plan)
    return tuple(front)


def _crossings(a: Partition, b: Partition) -> Iterator[float]:
    """Yield uplink times at which ``a``, before its bend, may take as long as ``b``."""
    m, n = a.num_micro_batches, b.num_micro_batches
    if m > n:
        yield m * n * (b.latency_s - a.latency_s) / (n - m)
    if m > 1:
        yield m * (a.latency_s - b.latency_s + (n - 1) * b.slowest_s) / (m - 1)


def _faster_somewhere(
    point: Partition, others: Sequence[Partition], problem: ClusterProblem
) -> bool:
    """Whether the point is faster, for some time of the uplink, than all others with no more
    segments."""
    times = [each for each in problem.activation_s if math.isfinite(each)]
    rivals = [each for each in others if each.num_segments <= point.num_segments]
    if len(times) < len(problem.activation_s):  # points differ most at their bends
        bends = [each.num_micro_batches * each.slowest_s for each in (point, *others)]
        bends += (time_s for pair in permutations(rivals, 2) for time_s in _crossings(*pair))
        times += [max(each, times[-1]) for each in bends]
    return any(
        all(batch_s(point, time_s) < batch_s(each, time_s) for each in rivals) for time_s in times
    )
