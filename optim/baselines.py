"""Strategies that solve no round: everyone, or J units by a rule."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import ClusterState
from optim.cluster_plan import cluster_plan, fronts
from optim.partition import even_partition, exact_partition
from optim.planner import RoundRequest
from optim.problem import LATENCIES, Latency, check_choice


@dataclass(frozen=True)
class EvenSplit:
    """Every unit in every round, blocks split evenly."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``; draws nothing."""
        return _even(request, range(len(request.clusters)))


@dataclass(frozen=True)
class AllUnits:
    """Every unit in every round, each with the fastest partition for its devices."""

    latency: str = "overlap"

    def __post_init__(self) -> None:
        check_choice("strategy.latency", self.latency, LATENCIES)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``; draws nothing."""
        return _fastest(request, self.latency, len(request.clusters))


@dataclass(frozen=True)
class RandomUnits:
    """J units of N in every round, each set of J equally likely; blocks split evenly."""

    num_scheduled: int

    def __post_init__(self) -> None:
        _check_count(self.num_scheduled)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``. Raises ``ConfigError`` for fewer than J units."""
        units = _enough(request, self.num_scheduled)
        return _even(request, rng.choice(units, size=self.num_scheduled, replace=False).tolist())


@dataclass(frozen=True)
class HighestLoss:
    """The J units whose last loss is highest, those without one first; blocks split evenly."""

    num_scheduled: int

    def __post_init__(self) -> None:
        _check_count(self.num_scheduled)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``; draws nothing. Raises ``ConfigError`` for fewer than J."""
        units = _enough(request, self.num_scheduled)
        losses = [math.inf if loss is None else loss for loss in request.losses]
        ranked = sorted(range(units), key=lambda unit: -losses[unit])
        return _even(request, ranked[: self.num_scheduled])


@dataclass(frozen=True)
class ShortestDelay:
    """The J units with the fastest pipelines, each with the fastest partition for its devices."""

    num_scheduled: int
    latency: str = "overlap"

    def __post_init__(self) -> None:
        _check_count(self.num_scheduled)
        check_choice("strategy.latency", self.latency, LATENCIES)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``; draws nothing. Raises ``ConfigError`` for fewer than J."""
        _enough(request, self.num_scheduled)
        return _fastest(request, self.latency, self.num_scheduled)


def _check_count(num_scheduled: int) -> None:
    if num_scheduled < 1:
        raise ConfigError(f"strategy.num_scheduled={num_scheduled}: must be at least 1")


def _enough(request: RoundRequest, num_scheduled: int) -> int:
    """N, which must not be below J."""
    units = len(request.clusters)
    if num_scheduled > units:
        raise ConfigError(
            f"strategy.num_scheduled={num_scheduled}: more than federation.num_units={units}"
        )
    return units


def _even(request: RoundRequest, chosen: Iterable[int]) -> RoundPlan:
    clusters = (request.clusters[place] for place in sorted(chosen))
    return RoundPlan(request.round, tuple(_even_cluster(request, c) for c in clusters))


def _even_cluster(request: RoundRequest, cluster: ClusterState) -> ClusterPlan:
    segments = even_partition(request.num_blocks, cluster.devices, request.num_segments)
    return ClusterPlan(cluster.unit, segments, request.num_micro_batches, request.schedule)


def _fastest(request: RoundRequest, latency: str, num_scheduled: int) -> RoundPlan:
    """The units with the fastest pipelines, in the units' order; who cannot hold the model, not."""
    found = fronts(request, cast(Latency, latency), exact_partition)
    able = [place for place, front in enumerate(found) if front]
    ranked = sorted(able, key=lambda place: found[place][-1].latency_s)
    chosen = sorted(ranked[:num_scheduled])
    plans = (cluster_plan(request, request.clusters[place], found[place][-1]) for place in chosen)
    return RoundPlan(request.round, tuple(plans))
