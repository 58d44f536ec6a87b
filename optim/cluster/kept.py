"""Plans of later rounds with the shares of an earlier one, for real devices.

The weights' last bits depend on micro-batches, and on the blocks and rows of shares, but not on who
computes them.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from collapipe.plan import ClusterPlan
from collapipe.step_law import StepLaw
from optim.problem import ClusterProblem, Partition, stages_of_plan
from optim.sharing.law import largest_rows
from optim.sharing.modes import decided
from optim.simulated_plan import MOST_SIMULATED, as_good, simulated, simulates
from optim.verified import is_possible

_MOST_PLANS = 1000  # that are compared


def kept_point(
    kept: ClusterPlan, problem: ClusterProblem, law: StepLaw | None, schedule: str
) -> Partition | None:
    """Return the fastest plan with the stages and shares of the ``kept`` one, or None if devices
    cannot hold them.

    Only devices change: others take over the shares of those that are not present; if they cannot,
    two are exchanged, one more is left out, or two pairs are exchanged. If a ``law`` was measured,
    two are also exchanged if that is faster by more than the prediction's interval.
    """
    stops = [segment.span.stop for segment in kept.segments]
    m = kept.num_micro_batches
    if m > problem.max_micro_batches or stops[-1:] != [problem.num_blocks]:
        return None  # of another run

    def timed(point: Partition) -> Partition:
        if law is None or not simulates(point):
            return point
        return simulated(point, problem, law, schedule)

    most = max(1, MOST_SIMULATED // (m * max(1, len(kept.devices))))
    found = sorted(_nearest(kept, problem), key=lambda each: each[0].latency_s)[:most]
    if not found:
        return None
    every = [(timed(point), plan) for point, plan in found]
    best, plan = min(every, key=lambda each: each[0].latency_s)
    if law is None:
        return best
    swapped = _possible(plan.swapping([device.name for device in problem.devices]), problem)
    others = [timed(point) for point, _ in islice(swapped, most)]
    faster = (point for point in others if not as_good(point, best, law))
    return min([best, *faster], key=lambda each: each.latency_s)


def _nearest(kept: ClusterPlan, problem: ClusterProblem) -> list[tuple[Partition, ClusterPlan]]:
    """Return the possible plans that need the fewest changes; empty if there is none."""
    names = [device.name for device in problem.devices]
    once = list(kept.swapping(names))
    twice = chain.from_iterable(each.swapping(names) for each in once)
    fewer = (pair for name in names for pair in _possible([kept], problem, without=name))
    ways = _possible([kept], problem), _possible(once, problem), fewer, _possible(twice, problem)
    return next(filter(None, map(list, ways)), [])


def _possible(
    plans: Iterable[ClusterPlan], problem: ClusterProblem, without: str = ""
) -> Iterator[tuple[Partition, ClusterPlan]]:
    """Yield the plans with the shares of these on the problem's devices, ``without`` one of them,
    as far as these can hold them."""
    names = [device.name for device in problem.devices if device.name != without]
    moved = (each.without({*each.devices} - {*names}, each.unused(names)) for each in plans)
    for plan in islice(chain.from_iterable(moved), _MOST_PLANS):
        m = plan.num_micro_batches
        stages = stages_of_plan(plan, problem.devices, largest_rows(problem, m))
        point = decided(problem, stages, m)
        if is_possible(problem.in_modes(point.recomputing), point):
            yield point, plan
