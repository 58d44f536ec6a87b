"""Strategies that weigh nothing against anything: everyone, or J units by a rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import ClusterPlan, RoundPlan, segment_plans
from collapipe.state import ClusterState
from optim.allocation.exact import exact_allocation
from optim.cluster_plan import (
    Front,
    cluster_plan,
    cluster_problem,
    fastest,
    fronts,
    of_each,
    solve_round,
)
from optim.latency import require_within_caps
from optim.partition.baselines import even_blocks
from optim.planner import RoundRequest
from optim.problem import LATENCIES, Latency, RoundOptions, check_choice
from optim.solvers import CLUSTER_SOLVERS, cluster_solver

# Replicas are no segments that pipelines could run: only a framework can ask for them.
PARTITIONS = tuple(name for name in CLUSTER_SOLVERS if name != "vanilla_fl")


@dataclass(frozen=True)
class EvenSplit:
    """Every unit in every round, blocks split evenly or as the framework prescribes; no uplinks.

    A cluster that its share does not fit sits out.
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        if request.partition is not None:
            found = fronts(request, "overlap", cluster_solver(request.partition), rng)
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
            "a segment needs a device and a block of its own: lower pipeline.num_segments"
        )
    blocks = even_blocks(request.num_blocks, count) + [0] * (len(devices) - count)
    require_within_caps("even", problem, blocks, m)
    return ClusterPlan(cluster.unit, segment_plans(devices, blocks), m, request.schedule)


@dataclass(frozen=True, kw_only=True)
class AllUnits:
    """Every unit in every round, split by a solver.

    Where units tell their uplinks and there are enough channels, each unit gets the channel and
    power that end the round soonest, and who can afford no channel sits out; else no uplinks are
    planned. No queues are kept.
    """

    partition: str = "exact"  # see ``optim.solvers``; one that the framework prescribes goes first
    latency: str = "overlap"  # the law of the pipeline's time
    fading: str = "none"  # see ``RoundOptions``
    uplink: str = "streamed"  # likewise
    energy: str = "all"  # likewise
    error_budget: float = 1e-3  # ρ̄, which no unit's ρ exceeds in any round

    def __post_init__(self) -> None:
        check_choice("strategy.partition", self.partition, PARTITIONS)
        check_choice("strategy.latency", self.latency, LATENCIES)
        try:
            _ = self._options
        except ConfigError as error:
            raise ConfigError(f"strategy.{error}") from error

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        chosen = self._chosen(request, rng)
        if _tells_uplinks(request) and sum(map(bool, chosen)) <= len(request.channels):
            plans = minimize_makespan(request, chosen, self._options)
        else:
            plans = _fastest(request, chosen)
        return RoundPlan(request.round, plans)

    def _chosen(self, request: RoundRequest, rng: np.random.Generator) -> tuple[Front, ...]:
        """The fronts of all N clusters, empty for those that take no part."""
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
        return fronts(request, latency, solve, rng, self._options, order, most)

    @property
    def _options(self) -> RoundOptions:
        """With queues of 0 there is no drift: the makespan is all that counts."""
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
    """J of the units that can hold the model: as many as channels at most, all if they are fewer.

    The rule decides who takes part, not who would be first on few channels.
    """

    num_scheduled: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_scheduled < 1:
            raise ConfigError(f"strategy.num_scheduled={self.num_scheduled}: must be at least 1")

    def _most(self, request: RoundRequest) -> int:
        """How many of the units are drawn, of whom some may find no channel."""
        limit = len(request.channels) if _tells_uplinks(request) else self.num_scheduled
        return min(limit, self.num_scheduled)

    def _chosen(self, request: RoundRequest, rng: np.random.Generator) -> tuple[Front, ...]:
        return self._fronts(request, rng, self._order(request, rng), self._most(request))

    def _order(self, request: RoundRequest, rng: np.random.Generator) -> Sequence[int]:
        """Places of all clusters: the first J that can hold the model take part."""
        return range(len(request.clusters))


@dataclass(frozen=True)
class RandomUnits(SelectUnits):
    """J units by chance, each set of J equally likely."""

    def _order(self, request: RoundRequest, rng: np.random.Generator) -> Sequence[int]:
        # Drawn before anything of the partitions: the same units, however they split.
        order: list[int] = rng.permutation(len(request.clusters)).tolist()
        return order


@dataclass(frozen=True)
class HighestLoss(SelectUnits):
    """The J units whose last loss is highest, those without one first."""

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


def _tells_uplinks(request: RoundRequest) -> bool:
    told = any(cluster.uplink is not None for cluster in request.clusters)
    return told and bool(request.channels)


def _fastest(request: RoundRequest, found: tuple[Front, ...]) -> tuple[ClusterPlan, ...]:
    """Each cluster's fastest partition, without an uplink; none where the front is empty."""
    pairs = zip(request.clusters, found, strict=True)
    return tuple(
        cluster_plan(request, cluster, fastest(front)) for cluster, front in pairs if front
    )
