"""Plan the rest of a round after a unit has lost devices."""

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan
from collapipe.state import DeviceProfile
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem
from optim.sharing.exact import shared_partition
from optim.sharing.law import partition_of_plan
from optim.step import in_flight
from optim.verified import is_possible, solve_verified

_MOST_PLANS = 1000  # that are compared


def plan_after_loss(
    plan: ClusterPlan,
    missing: Collection[str],
    left: Sequence[DeviceProfile],
    batch_size: int,
    most_segments: int | None,
    may_share: bool,
) -> tuple[ClusterPlan, str | None]:
    """Return the fastest plan over the devices that are ``left``, with the same micro-batches, and
    a message if it changes the weights' last bits. Those of them that are ``missing``, too, have
    refused blocks and take over no shares.

    ``most_segments`` None allows one on each device. ``may_share`` allows shared stages to a plan
    that has none. Raises ``InfeasibleRoundError`` if the devices cannot hold the model.
    """
    if plan.shares and (taken_over := taken_over_by(plan, missing, left, batch_size)):
        return taken_over, None
    problem = _problem(plan, left, batch_size)
    try:
        found = solve_verified(problem, exact_partition, np.random.default_rng(0))
    except InfeasibleRoundError as impossible:
        if not (may_share or plan.shares):
            raise
        try:
            found = solve_verified(problem, shared_partition, np.random.default_rng(0))
        except InfeasibleRoundError:
            raise impossible from None
    most = most_segments or len(left)
    allowed = [each for each in found.front if each.num_segments <= most]
    best = min(allowed or [found.best], key=lambda each: each.latency_s)
    new = ClusterPlan(plan.unit, best.segments(left), plan.num_micro_batches, plan.schedule)
    if not (plan.shares or best.shares):
        return new, None
    what = "shares" if plan.shares else "blocks without sharing them"
    return new, (
        f"without {', '.join(sorted(missing))} no devices can hold the {what}: blocks are planned "
        "anew, which changes the weights' last bits"
    )


def taken_over_by(
    plan: ClusterPlan, missing: Collection[str], left: Sequence[DeviceProfile], batch_size: int
) -> ClusterPlan | None:
    """Return the fastest plan with the same shares over the devices that are ``left``; None if none
    can hold them. After several losses not all plans are compared."""
    found = list[tuple[float, int, ClusterPlan]]()
    devices = {each.name: each for each in left if each.name not in missing}
    every = plan.without(missing, plan.unused([*devices]))
    for number, each in enumerate(islice(every, _MOST_PLANS)):
        problem = _problem(plan, [*each.in_modes(devices).values()], batch_size).sharing()
        problem = problem.unlimited() if each.over_limits else problem
        point = partition_of_plan(problem, each)
        if is_possible(problem, point):
            found.append((point.latency_s, number, each))
    return min(found)[-1] if found else None


def _problem(
    plan: ClusterPlan, devices: Sequence[DeviceProfile], batch_size: int
) -> ClusterProblem:
    """Return the problem of these devices with the plan's blocks and micro-batches."""
    return ClusterProblem(
        devices=tuple(devices),
        num_blocks=plan.segments[-1].span.stop,
        batch_size=batch_size,
        max_micro_batches=plan.num_micro_batches,
        latency="overlap",  # real devices send while they compute
        min_micro_batches=plan.num_micro_batches,
        in_flight=in_flight(plan.schedule, len(devices)),
    )
