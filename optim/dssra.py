"""DSSRA: the round as one problem, solved, verified and written down (Algorithm 4)."""

from dataclasses import dataclass
from typing import cast

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import ClusterPlan, RoundPlan, UplinkPlan
from collapipe.state import ClusterState, Uplink
from optim.cluster_plan import cluster_front, cluster_plan
from optim.convergence import next_queues, round_gammas
from optim.planner import RoundRequest
from optim.problem import (
    LATENCIES,
    Allocation,
    Latency,
    Partition,
    RoundOptions,
    RoundProblem,
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
    """

    solver: str = "exact"
    latency: str = "overlap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("strategy.solver", self.solver, ("exact", "paper"))
        check_choice("strategy.latency", self.latency, LATENCIES)

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """See ``Planner.plan_round``.

        A cluster that cannot hold the model sits out; the round is infeasible only if none can
        take part.
        """
        latency = cast(Latency, self.latency)
        solver = cluster_solver(self.solver)
        fronts, reasons = list[tuple[Partition, ...]](), list[str]()
        for cluster in request.clusters:
            try:
                fronts.append(
                    cluster_front(request, cluster, latency, lambda asked: solver(asked, rng))
                )
            except InfeasibleRoundError as error:
                fronts.append(())
                reasons.append(f"unit {cluster.unit}: {error}")
        if not any(fronts):
            raise InfeasibleRoundError("; ".join(reasons))
        problem = RoundProblem(
            tuple(fronts),
            tuple(_uplink(cluster, len(request.channels)) for cluster in request.clusters),
            request.channels,
            request.queues,
            request.num_blocks,
            self,
        )
        solution = round_solver(self.solver)(problem)
        verify_round(solution, problem)
        gammas = round_gammas(problem, solution.allocations)
        plans = (_allocated(request, allocation) for allocation in solution.allocations)
        return RoundPlan(
            request.round,
            tuple(plans),
            gammas,
            next_queues(request.queues, gammas, self.gamma_max),
            solution.certificate,
        )


def _allocated(request: RoundRequest, allocation: Allocation) -> ClusterPlan:
    uplink = UplinkPlan(allocation.channel, allocation.power_w, allocation.upload_s)
    cluster = request.clusters[allocation.unit]
    return cluster_plan(request, cluster, allocation.partition, uplink)


def _uplink(cluster: ClusterState, num_channels: int) -> Uplink:
    if cluster.uplink is None or len(cluster.uplink.gains) != num_channels:
        raise InfeasibleRoundError(
            f"unit {cluster.unit} did not say what its uplink is like on {num_channels} channels"
        )
    return cluster.uplink
