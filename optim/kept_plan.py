"""Plans of later rounds with the shares that a run on real devices began with.

The weights' last bits depend on the blocks and the rows of shares, but not on who computes them. So
bits depend neither on the clock nor on a loss.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from collapipe.plan import ClusterPlan
from collapipe.step_law import StepLaw
from optim.problem import ClusterProblem, Partition
from optim.sharing.law import partition_of_plan
from optim.simulated_plan import as_good, fits_in_order, simulated, simulates

_MOST_PLANS = 100  # that are compared if devices are missing


def kept_front(
    kept: ClusterPlan, problem: ClusterProblem, law: StepLaw | None, schedule: str
) -> list[Partition]:
    """Return the fastest plan with the stages and shares of the ``kept`` one, alone; nothing if it
    has no shares or devices cannot hold them.

    Only devices change: others take over the shares of those that are not present and, if a ``law``
    was measured, two are exchanged if that is faster by more than the prediction's interval.
    """
    if not kept.shares:
        return []
    problem = problem.unlimited() if kept.over_limits else problem
    names = [device.name for device in problem.devices]
    gone = {each for segment in kept.segments for each in segment.devices} - {*names}

    def points(plans: Iterator[ClusterPlan]) -> Iterator[tuple[Partition, ClusterPlan]]:
        for plan in islice(plans, _MOST_PLANS):
            point = replace(partition_of_plan(problem, plan), over_limits=kept.over_limits)
            if fits_in_order(point, problem):
                timed = law and simulates(point) and simulated(point, problem, law, schedule)
                yield timed or point, plan

    found = list(points(kept.without(gone, kept.unused(names))))
    if not found:
        return []
    best, plan = min(found, key=lambda each: each[0].latency_s)
    if law is not None and simulates(best):
        swapped = (point for point, _ in points(plan.swapping(names)))
        others = [point for point in swapped if not as_good(point, best, law)]
        best = min([best, *others], key=lambda each: each.latency_s)
    return [best]
