"""DSSRA: the round as one problem, solved, verified and written down (Algorithm 4)."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.state import Uplink
from optim.allocation import exact_allocation
from optim.cluster_plan import cluster_plan, fronts
from optim.convergence import idle_gamma, next_queues, round_gammas
from optim.partition import exact_partition
from optim.planner import RoundRequest
from optim.problem import (
    LATENCIES,
    Allocation,
    ClusterProblem,
    ClusterSolution,
    Latency,
    RoundOptions,
    RoundProblem,
    RoundSolution,
    check_choice,
)
from optim.solvers import cluster_solver, round_solver
from optim.verify import verify_round


@dataclass(frozen=True)
class Dssra(RoundOptions):
    """Who takes part, on which channel and at which power, with which S, m and δ.

    Attributes
    ----------
    solver
        ``exact``, or ``paper``: Algorithms 2 to 4.
    latency
        The law of the pipeline's time.
    time_limit_s
        Of ``exact``, for each cluster and for the round; an answer that it cuts short has a gap.
    """

    solver: str = "exact"
    latency: str = "overlap"
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ConfigError(f"strategy.{error}") from error
        check_choice("strategy.solver", self.solver, ("exact", "paper"))
        check_choice("strategy.latency", self.latency, LATENCIES)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``.

        A cluster that cannot hold the model sits out; the round is infeasible only if none can
        take part.
        """
        problem = RoundProblem(
            fronts(request, cast(Latency, self.latency), lambda asked: self._split(asked, rng)),
            _uplinks(request),
            request.channels,
            request.queues,
            request.num_blocks,
            self,
        )
        solution = self._allocate(problem)
        verify_round(solution, problem)
        gammas = round_gammas(problem, solution.allocations)
        idle = (idle_gamma(request.channels, self),) * len(gammas)
        return RoundPlan(
            request.round,
            tuple(_allocated(request, allocation) for allocation in solution.allocations),
            gammas,
            next_queues(request.queues, gammas, self.gamma_max),
            next_queues(request.queues, idle, self.gamma_max),
            solution.certificate,
        )

    def _split(self, problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
        if self.solver == "exact":
            return exact_partition(problem, rng, self.time_limit_s)
        return cluster_solver(self.solver)(problem, rng)

    def _allocate(self, problem: RoundProblem) -> RoundSolution:
        if self.solver == "exact":
            return exact_allocation(problem, self.time_limit_s)
        return round_solver(self.solver)(problem)


def _allocated(request: RoundRequest, allocation: Allocation) -> ClusterPlan:
    uplink = UplinkPlan(allocation.channel, allocation.power_w, allocation.upload_s)
    cluster = request.clusters[allocation.unit]
    return cluster_plan(request, cluster, allocation.partition, uplink)


def _uplinks(request: RoundRequest) -> tuple[Uplink, ...]:
    """Each unit's; one that is not known reaches nobody, so that its unit sits out."""
    num_channels = len(request.channels)
    deaf = Uplink(0.0, 0.0, 1.0, 0.0, (0.0,) * num_channels)
    uplinks = [cluster.uplink or deaf for cluster in request.clusters]
    known = [len(each.gains) == num_channels and each is not deaf for each in uplinks]
    if not any(known):
        raise InfeasibleRoundError(f"no unit told its uplink to the {num_channels} channels")
    return tuple(each if heard else deaf for each, heard in zip(uplinks, known, strict=True))
