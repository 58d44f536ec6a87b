"""Plan a round or a cluster from Python, outside of a run; every answer is verified."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from collapipe.errors import ConfigError, one_line
from collapipe.plan import Certificate, RoundPlan, SegmentPlan
from collapipe.state import (
    Channel,
    ClusterState,
    DeviceProfile,
    check_each,
    check_links,
    check_sizes,
)
from optim.dssra import Dssra
from optim.planned import planned
from optim.planner import Planner, RoundRequest
from optim.problem import ClusterProblem, Latency, Partition, check_choice
from optim.solvers import cluster_solver
from optim.step import in_flight, schedules
from optim.verified import solve_verified, witnessed


@dataclass(frozen=True, slots=True)
class CertifiedPlan:
    """The fastest plan of a cluster that a solver found, and how far it can be from the best one.

    ``segments`` are in pipeline order; without segments every device trains all blocks
    (``vanilla_fl``). ``front`` has the fastest partition for each number of segments; its blocks
    are in the devices' order.
    """

    segments: tuple[SegmentPlan, ...]
    num_micro_batches: int  # m
    latency_s: float  # of a batch
    certificate: Certificate
    front: tuple[Partition, ...]


def plan_cluster(
    devices: Sequence[DeviceProfile],
    *,
    num_blocks: int,
    batch_size: int,
    max_micro_batches: int | None = None,
    latency: Latency = "overlap",
    schedule: str = "one_f_one_b",
    solver: str = "exact",
    seed: int = 0,
) -> CertifiedPlan:
    """Split ``num_blocks`` blocks and a batch over the devices of one cluster.

    The plan is a pipeline of single devices, in the given order unless memory requires another
    one; devices may be left out. With solver ``shared``, devices with a ``sharing`` law may also
    share stages. ``max_micro_batches`` is at most, and by default, the batch's samples. Memory
    counts as many micro-batches as a device keeps at its place in the ``schedule``, which cannot be
    ``auto``, because the laws of time do not differ. ``solver`` is a name that ``collapipe plan
    --solver`` knows; ``seed`` matters only if the solver draws.

    Raises ``ConfigError`` for impossible sizes or unknown names, ``InfeasibleRoundError`` if the
    devices cannot hold the blocks, and ``PlanViolationError`` if the solver's answer is wrong.
    """
    check_each("devices", devices, DeviceProfile)
    requested = batch_size if max_micro_batches is None else max_micro_batches
    check_sizes(
        devices=len(devices),
        num_blocks=num_blocks,
        batch_size=batch_size,
        max_micro_batches=requested,
    )
    _check_once("devices", [each.name for each in devices])
    check_links(devices)
    check_choice("schedule", schedule, schedules("auto", measured=True))
    most = min(requested, batch_size)
    kept = in_flight(schedule, len(devices))
    problem = ClusterProblem(tuple(devices), num_blocks, batch_size, most, latency, in_flight=kept)
    found = solve_verified(problem, cluster_solver(solver), _generator(seed))
    solution = witnessed(problem, found)
    best = solution.best
    return CertifiedPlan(
        segments=best.segments(devices),
        num_micro_batches=best.num_micro_batches,
        latency_s=best.latency_s,
        certificate=solution.certificate,
        front=solution.front,
    )


def plan_round(
    clusters: Sequence[ClusterState],
    channels: Sequence[Channel],
    *,
    num_blocks: int,
    batch_size: int,
    strategy: Planner | None = None,
    previous: RoundPlan | None = None,
    local_steps: int = 1,
    schedule: str = "one_f_one_b",
    seed: int = 0,
) -> RoundPlan:
    """Plan one round: participants, channels, powers, and the blocks of each device.

    ``strategy`` defaults to ``Dssra()``; its ``plan_round`` gets the whole request. ``previous`` is
    the last round's plan, from which the round's number and all queues continue; None plans round 1
    with empty queues. After an infeasible round continue from ``replace(previous,
    round=previous.round + 1, queues=error.queues)``, with each of the ``error_queues`` shorter by
    1, down to 0. ``schedule`` may be ``auto``.

    Raises ``InfeasibleRoundError`` with the numbers and what would make the round feasible,
    ``ConfigError`` for impossible sizes or a ``previous`` of another number of clusters, and
    ``PlanViolationError`` if the strategy's plan violates a constraint.
    """
    check_each("clusters", clusters, ClusterState)
    check_each("channels", channels, Channel)
    check_sizes(clusters=len(clusters), channels=len(channels), num_blocks=num_blocks)
    check_sizes(batch_size=batch_size, local_steps=local_steps)
    check_choice("schedule", schedule, ("auto", *schedules("auto", measured=True)))
    strategy = Dssra() if strategy is None else strategy
    if isinstance(strategy, type) or not hasattr(strategy, "plan_round"):
        raise ConfigError(f"strategy={one_line(strategy)}: must be an object such as Dssra()")
    last = RoundPlan(0, ()) if previous is None else previous
    if not isinstance(last, RoundPlan):
        raise ConfigError(f"previous={one_line(last)}: must be the plan of the last round")
    for name in ("queues", "error_queues"):
        if (count := len(getattr(last, name))) not in (0, len(clusters)):
            raise ConfigError(f"previous: has {count} {name}, expected {len(clusters)}")
        if not all(math.isfinite(each) and each >= 0 for each in getattr(last, name)):
            raise ConfigError(f"previous: {name} must be finite and not negative")
    request = RoundRequest(
        round=last.round + 1,
        clusters=tuple(clusters),
        num_blocks=num_blocks,
        batch_size=batch_size,
        local_steps=local_steps,
        num_segments=None,
        num_micro_batches=batch_size,
        schedule=schedule,
        channels=tuple(channels),
        queues=last.queues or (0.0,) * len(clusters),
        losses=(None,) * len(clusters),
        error_queues=last.error_queues,
    )
    _check_once("clusters", [each.unit for each in request.clusters])
    return planned(strategy, request, _generator(seed, request.round))


def _generator(seed: int, *purpose: int) -> np.random.Generator:
    if not (isinstance(seed, Integral) and seed >= 0):
        raise ConfigError(f"seed={one_line(seed)}: must be a whole number from 0 on")
    return np.random.default_rng((seed, *purpose))


def _check_once(what: str, names: Sequence[object]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{what}: {twice[0]} is there twice")
