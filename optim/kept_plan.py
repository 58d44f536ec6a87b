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
    m, devices = kept.num_micro_batches, problem.devices
    names = [device.name for device in devices]
    stops = [segment.span.stop for segment in kept.segments]
    if m > problem.max_micro_batches or stops[-1:] != [problem.num_blocks]:
        return None  # of another run

    def possible(
        plans: Iterable[ClusterPlan], beside: str = ""
    ) -> Iterator[tuple[Partition, ClusterPlan]]:
        """Yield the plans with these shares on devices that are present, without one ``beside``."""
        there = [name for name in names if name != beside]
        present = (p.without({*p.devices} - {*there}, p.unused(there)) for p in plans)
        for plan in islice(chain.from_iterable(present), _MOST_PLANS):
            stages = stages_of_plan(plan, devices, largest_rows(problem, m))
            point = decided(problem, stages, m)
            if is_possible(problem.in_modes(point.recomputing), point):
                yield point, plan

    def timed(point: Partition) -> Partition:
        fits = law is not None and simulates(point)
        return simulated(point, problem, law, schedule) if law and fits else point

    once = list(kept.swapping(names))
    twice = chain.from_iterable(each.swapping(names) for each in once)
    fewer = (pair for name in names for pair in possible([kept], beside=name))
    ways = possible([kept]), possible(once), fewer, possible(twice)
    found = next(filter(None, map(list, ways)), [])
    most = max(1, MOST_SIMULATED // (m * max(1, len(kept.devices))))
    found = sorted(found, key=lambda each: each[0].latency_s)[:most]
    if not found:
        return None
    best, plan = min(
        ((timed(point), plan) for point, plan in found), key=lambda each: each[0].latency_s
    )
    if law is None:
        return best
    swapped = (timed(point) for point, _ in islice(possible(plan.swapping(names)), most))
    others = (point for point in swapped if not as_good(point, best, law))
    return min([best, *others], key=lambda each: each.latency_s)
