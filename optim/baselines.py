"""Strategies that look at no measurement: everyone, or units by chance; blocks split evenly."""

from dataclasses import dataclass

import numpy as np

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.state import ClusterState
from optim.partition import even_partition
from optim.planner import RoundRequest


@dataclass(frozen=True)
class EvenSplit:
    """Every unit in every round."""

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``; draws nothing."""
        return RoundPlan(request.round, tuple(_even(request, c) for c in request.clusters))


@dataclass(frozen=True)
class RandomUnits:
    """J units of N in every round, each set of J equally likely."""

    num_scheduled: int

    def __post_init__(self) -> None:
        if self.num_scheduled < 1:
            raise ConfigError(f"strategy.num_scheduled={self.num_scheduled}: must be at least 1")

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``. Raises ``ConfigError`` for fewer than J units."""
        units = len(request.clusters)
        if self.num_scheduled > units:
            raise ConfigError(
                f"strategy.num_scheduled={self.num_scheduled}: more than "
                f"federation.num_units={units}"
            )
        chosen = sorted(rng.choice(units, size=self.num_scheduled, replace=False).tolist())
        return RoundPlan(request.round, tuple(_even(request, request.clusters[i]) for i in chosen))


def _even(request: RoundRequest, cluster: ClusterState) -> ClusterPlan:
    segments = even_partition(request.num_blocks, cluster.devices, request.num_segments)
    return ClusterPlan(cluster.unit, segments, request.num_micro_batches, request.schedule)
