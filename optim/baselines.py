"""Baseline strategies: all units, or J units by a simple rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import ClusterState
from optim.allocation.exact import exact_allocation
from optim.cluster.cache import Front
from optim.cluster.fronts import fastest, fronts, known_plans, of_each
from optim.cluster.plan import cluster_plan
from optim.cluster.problem import cluster_problem
from optim.joint_round import solve_round
from optim.latency import require_within_caps
from optim.partition.baselines import even_blocks
from optim.planner import RoundRequest
from optim.problem import LATENCIES, Latency, Partition, check_choice
from optim.round.problem import RoundOptions
from optim.sharing.modes import needing
from optim.solvers import CLUSTER_SOLVERS, cluster_solver
from optim.step import schedules

# ``vanilla_fl`` makes replicas, which pipelines cannot run, so only a framework may choose it.
PARTITIONS = tuple(name for name in CLUSTER_SOLVERS if name != "vanilla_fl")


@dataclass(frozen=True)
class EvenSplit:
    """All units in every round, with blocks split evenly or by the framework's rule; no uplinks.

    A cluster takes no part if a device cannot hold its share.
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        if request.partition is not None:
            solve = cluster_solver(request.partition)
            found = known_plans(fronts(request, "overlap", solve, rng))
            return RoundPlan(request.round, _fastest(request, found))
        plans = of_each(request, lambda cluster: _even(request, cluster))
        return RoundPlan(request.round, tuple(plan for plan in plans if plan is not None))


def _even(request: RoundRequest, cluster: ClusterState) -> ClusterPlan:
    problem, m = cluster_problem(request, cluster, "overlap"), request.num_micro_batches
    devices, most = problem.devices, min(request.num_blocks, len(problem.devices))
    count = request.num_segments or most
    if not 1 <= count <= most:
        raise InfeasibleRoundError(
            f"{count} segments for {len(devices)} devices and {request.num_blocks} blocks; "
            "each segment needs a separate device and at least one block; lower "
            "pipeline.num_segments"
        )
    blocks = even_blocks(request.num_blocks, count) + [0] * (len(devices) - count)
    point = Partition(tuple(blocks), m, 0.0)
    point = replace(point, recomputing=needing(problem, point))
    require_within_caps("even", problem.in_modes(point.recomputing), blocks, m)
    (schedule,) = schedules(request.schedule, measured=False)
    return ClusterPlan(cluster.unit, point.segments(devices), m, schedule)


@dataclass(frozen=True, kw_only=True)
class AllUnits:
    """All units in every round, split by a solver.

    If units report their uplinks and there are enough channels, channels and powers minimise the
    round's makespan. A unit that can afford no channel then takes no part. Otherwise no uplinks are
    planned. No queues are kept.
    """

    partition: str = "exact"  # see ``optim.solvers``; the framework's solver takes precedence
    latency: str = "overlap"  # the law of the pipeline's time
    fading: str = "none"  # see ``RoundOptions``
    uplink: str = "streamed"  # see ``RoundOptions``
    energy: str = "all"  # see ``RoundOptions``
    error_budget: float = 1e-3  # ρ̄, the upper bound of each unit's ρ in every round

    def __post_init__(self) -> None:
        check_choice("strategy.partition", self.partition, PARTITIONS)
        check_choice("strategy.latency", self.latency, LATENCIES)
        try:
            _ = self._options
        except ConfigError as error:
            raise ConfigError(f"strategy.{error}") from error

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        chosen = self._chosen(request, rng)
        if _has_uplinks(request) and sum(map(bool, chosen)) <= len(request.channels):
            plans = minimize_makespan(request, chosen, self._options)
        else:
            plans = _fastest(request, chosen)
        return RoundPlan(request.round, plans)

    def _chosen(self, request: RoundRequest, rng: np.random.Generator) -> tuple[Front, ...]:
        """Return the fronts of all N clusters, empty for clusters that take no part."""
        return self._fronts(request, rng)

    def _fronts(
        self,
        request: RoundRequest,
        rng: np.random.Generator,
        order: Sequence[int] = (),
        most: int | None = None,
    ) -> tuple[Front, ...]:
        solve = cluster_solver(request.partition or self.partition)
        latency = cast(Latency, self.latency)
        return known_plans(fronts(request, latency, solve, rng, self._options, order, most))

    @property
    def _options(self) -> RoundOptions:
        """The options of ``minimize_makespan``: with queues of 0 only the makespan counts."""
        return RoundOptions(
            drift_weight=1.0,
            interference_constant_w=0.0,
            fading=self.fading,
            uplink=self.uplink,
            energy=self.energy,
            error_budget=self.error_budget,
        )


def minimize_makespan(
    request: RoundRequest, chosen: tuple[Front, ...], options: RoundOptions
) -> tuple[ClusterPlan, ...]:
    """Choose channels, powers and points of the fronts that minimise the last unit's finish time.

    ``chosen`` has the fronts of all N clusters, empty for clusters that were not selected. A unit
    that can afford no channel is left out. Raises ``InfeasibleRoundError`` if no unit remains.
    """
    return solve_round(request, chosen, (0.0,) * len(chosen), options, exact_allocation)[2]


@dataclass(frozen=True)
class SelectUnits(AllUnits):
    """J of the units that can hold the model, at most as many as there are channels.

    The rule selects the units that take part; it does not rank units for scarce channels.
    """

    num_scheduled: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_scheduled < 1:
            raise ConfigError(f"strategy.num_scheduled={self.num_scheduled}: must be at least 1")

    def _most(self, request: RoundRequest) -> int:
        """The number of units to select, of which some may get no channel."""
        limit = len(request.channels) if _has_uplinks(request) else self.num_scheduled
        return min(limit, self.num_scheduled)

    def _chosen(self, request: RoundRequest, rng: np.random.Generator) -> tuple[Front, ...]:
        return self._fronts(request, rng, self._order(request, rng), self._most(request))

    def _order(self, request: RoundRequest, rng: np.random.Generator) -> Sequence[int]:
        """Return an order of all clusters: the first J that can hold the model take part."""
        return range(len(request.clusters))


@dataclass(frozen=True)
class RandomUnits(SelectUnits):
    """J random units; each set of J is equally likely."""

    def _order(self, request: RoundRequest, rng: np.random.Generator) -> Sequence[int]:
        # Drawn before the partitions, so that every solver gets the same units.
        order: list[int] = rng.permutation(len(request.clusters)).tolist()
        return order


@dataclass(frozen=True)
class HighestLoss(SelectUnits):
    """The J units with the highest last loss; units without a loss go first."""

    def _order(self, request: RoundRequest, rng: np.random.Generator) -> Sequence[int]:
        losses = [math.inf if loss is None else loss for loss in request.losses]
        return sorted(range(len(losses)), key=lambda n: -losses[n])


@dataclass(frozen=True)
class ShortestDelay(SelectUnits):
    """The J units with the fastest pipelines."""

    def _chosen(self, request: RoundRequest, rng: np.random.Generator) -> tuple[Front, ...]:
        found = self._fronts(request, rng)
        able = [place for place, front in enumerate(found) if front]
        able.sort(key=lambda place: fastest(found[place]).latency_s)
        fast = able[: self._most(request)]
        return tuple(front if place in fast else () for place, front in enumerate(found))


def _has_uplinks(request: RoundRequest) -> bool:
    reported = any(cluster.uplink is not None for cluster in request.clusters)
    return reported and bool(request.channels)


def _fastest(request: RoundRequest, found: tuple[Front, ...]) -> tuple[ClusterPlan, ...]:
    """Plan each cluster's fastest partition without an uplink; skip clusters with empty fronts."""
    pairs = zip(request.clusters, found, strict=True)
    return tuple(
        cluster_plan(request, cluster, fastest(front)) for cluster, front in pairs if front
    )
