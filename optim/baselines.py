"""Strategies that weigh nothing against anything: everyone, or J units by a rule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import ClusterState
from optim.cluster_plan import Front, cluster_plan, cluster_problem, fronts, of_each
from optim.partition.exact import even_partition
from optim.partition.single_point import require_within_caps
from optim.planner import RoundRequest
from optim.problem import LATENCIES, Latency, check_choice
from optim.solvers import CLUSTER_SOLVERS, cluster_solver
from optim.uplinks import soonest

# Replicas are no segments that pipelines could run: only a framework can ask for them.
PARTITIONS = tuple(name for name in CLUSTER_SOLVERS if name != "vanilla_fl")


@dataclass(frozen=True)
class EvenSplit:
    """Every unit in every round, blocks split evenly or as the framework prescribes; no uplinks."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``. A cluster that its share does not fit sits out."""
        if request.partition is not None:
            found = fronts(request, "overlap", cluster_solver(request.partition), rng)
            return RoundPlan(request.round, _fastest(request, found))
        plans = of_each(request, lambda cluster: _even(request, cluster))
        return RoundPlan(request.round, tuple(plan for plan in plans if plan is not None))


def _even(request: RoundRequest, cluster: ClusterState) -> ClusterPlan:
    problem, m = cluster_problem(request, cluster, "overlap"), request.num_micro_batches
    segments = even_partition(request.num_blocks, problem.devices, request.num_segments)
    blocks = [segment.span.blocks for segment in segments]
    idle = [0] * (len(problem.devices) - len(segments))
    require_within_caps("even", problem, blocks + idle, m)
    return ClusterPlan(cluster.unit, segments, m, request.schedule)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """How units split and send once they are chosen.

    Where units tell their uplinks, each gets the channel and power that end the round soonest, and
    who can afford no channel sits out; else nothing is said of uplinks. No queues are kept.

    Attributes
    ----------
    partition
        Solver of each cluster's partition, see ``optim.solvers``; one that the framework prescribes
        goes first.
    latency
        The law of the pipeline's time.
    fading
        See ``RoundOptions``.
    """

    partition: str = "exact"
    latency: str = "overlap"
    fading: str = "none"

    def __post_init__(self) -> None:
        check_choice("strategy.partition", self.partition, PARTITIONS)
        check_choice("strategy.latency", self.latency, LATENCIES)
        check_choice("strategy.fading", self.fading, ("none", "rayleigh"))

    def _fronts(
        self,
        request: RoundRequest,
        rng: np.random.Generator,
        order: Sequence[int] = (),
        most: int | None = None,
    ) -> tuple[Front, ...]:
        solve = cluster_solver(request.partition or self.partition)
        return fronts(request, cast(Latency, self.latency), solve, rng, order, most)

    def _plan(self, request: RoundRequest, chosen: tuple[Front, ...], radio: bool) -> RoundPlan:
        plans = soonest(request, chosen, self.fading) if radio else _fastest(request, chosen)
        return RoundPlan(request.round, plans)


@dataclass(frozen=True)
class AllUnits(Baseline):
    """Every unit in every round.

    With fewer channels than units that can take part, no uplinks are planned.
    """

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        found = self._fronts(request, rng)
        enough = sum(map(bool, found)) <= len(request.channels)
        return self._plan(request, found, enough and _tells_uplinks(request))


@dataclass(frozen=True)
class Rule(Baseline):
    """J of the units that can hold the model, or all of them if they are fewer."""

    num_scheduled: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_scheduled < 1:
            raise ConfigError(f"strategy.num_scheduled={self.num_scheduled}: must be at least 1")

    def _most(self, request: RoundRequest) -> int:
        """J, and no more than channels: the rule decides who, not who ends first on them."""
        few = _tells_uplinks(request) and len(request.channels) < self.num_scheduled
        return len(request.channels) if few else self.num_scheduled

    def _first(
        self, request: RoundRequest, rng: np.random.Generator, order: Sequence[int]
    ) -> RoundPlan:
        """The first J in ``order`` that can hold the model; who comes behind is not even asked."""
        chosen = self._fronts(request, rng, order, self._most(request))
        return self._plan(request, chosen, _tells_uplinks(request))


@dataclass(frozen=True)
class RandomUnits(Rule):
    """J units by chance, each set of J equally likely."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        # Drawn before anything of the partitions: the same units, however they split.
        return self._first(request, rng, rng.permutation(len(request.clusters)).tolist())


@dataclass(frozen=True)
class HighestLoss(Rule):
    """The J units whose last loss is highest, those without one first."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        losses = [math.inf if loss is None else loss for loss in request.losses]
        return self._first(request, rng, sorted(range(len(losses)), key=lambda n: -losses[n]))


@dataclass(frozen=True)
class ShortestDelay(Rule):
    """The J units with the fastest pipelines."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``."""
        found = self._fronts(request, rng)
        able = [place for place, front in enumerate(found) if front]
        able.sort(key=lambda place: found[place][-1].latency_s)
        fast = able[: self._most(request)]
        chosen = tuple(front if place in fast else () for place, front in enumerate(found))
        return self._plan(request, chosen, _tells_uplinks(request))


def _tells_uplinks(request: RoundRequest) -> bool:
    told = any(cluster.uplink is not None for cluster in request.clusters)
    return told and bool(request.channels)


def _fastest(request: RoundRequest, found: tuple[Front, ...]) -> tuple[ClusterPlan, ...]:
    """Each cluster's fastest partition, without an uplink; none where the front is empty."""
    pairs = zip(request.clusters, found, strict=True)
    return tuple(cluster_plan(request, cluster, front[-1]) for cluster, front in pairs if front)
