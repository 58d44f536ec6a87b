"""DSSRA: solve the round as one joint problem (Algorithm 4)."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import cast

import numpy as np

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import RoundPlan
from optim.allocation.exact import exact_allocation
from optim.joint_round import plan_jointly
from optim.partition.exact import exact_partition
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterSolver, Latency, check_choice
from optim.round.convergence import idle_gamma, next_error_queues, next_queues, round_gammas
from optim.round.problem import RoundOptions, RoundSolver
from optim.sharing.exact import shared_partition
from optim.solvers import cluster_solver, round_solver


@dataclass(frozen=True)
class Dssra(RoundOptions):
    """Chooses the units that take part, with channel, power, S, m and δ of each.

    Solver ``paper`` uses Algorithms 2 to 4. Constants ``estimated`` compute κ = βη²/(2N) and φ²
    from the β and φ² estimated in training, once these are known. V and Γ^max must then suit their
    size.
    """

    solver: str = "exact"
    latency: str = "overlap"  # the law of the pipeline's time
    max_nodes: int = 100_000  # of ``exact``, per cluster and for the round; may leave a gap
    constants: str = "set"  # ``set`` takes κ and φ² from the options
    # ``auto``: devices may share stages, if ``exact`` plans any number of segments without a price
    sharing: str = "auto"

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ConfigError(f"strategy.{error}") from error
        check_choice("strategy.solver", self.solver, ("exact", "paper"))
        check_choice("strategy.latency", self.latency, LATENCIES)
        check_choice("strategy.constants", self.constants, ("set", "estimated"))
        check_choice("strategy.sharing", self.sharing, ("never", "auto"))

    def plan_round(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        """Return the round's plan.

        A cluster that cannot hold the model takes no part. Raises ``InfeasibleRoundError`` if no
        cluster can take part; the error has the queues, which then all grow.
        """
        known = self._with_estimates(request)
        try:
            return known._plan(request, rng)
        except InfeasibleRoundError as error:
            queues = known._idle_queues(request) if request.channels else ()
            raise InfeasibleRoundError(str(error), queues) from error

    def _with_estimates(self, request: RoundRequest) -> "Dssra":
        shown = request.estimates
        if self.constants == "set" or shown.smoothness is None or shown.gradient_bound is None:
            return self
        kappa = shown.smoothness * request.learning_rate**2 / (2 * len(request.clusters))
        return replace(self, kappa=kappa, gradient_bound=shown.gradient_bound)

    def _plan(self, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
        if self.solver != "exact" and any(c.uplink and c.uplink.payloads for c in request.clusters):
            raise ConfigError(
                f"strategy.solver={self.solver}: chooses no payload; set compression.activation, "
                "compression.upload and decoder.mode, or solver=exact"
            )
        name = request.partition or self.solver
        bounded = request.num_segments is not None or self.prices_segments
        exact = _exact(self.max_nodes, shares=self.sharing == "auto" and not bounded)
        splitter = exact if name == "exact" else cluster_solver(name)
        allocate: RoundSolver = partial(exact_allocation, max_nodes=self.max_nodes)
        if self.solver != "exact":
            allocate = round_solver(self.solver)
        latency = cast(Latency, self.latency)
        problem, solution, plans = plan_jointly(request, latency, splitter, rng, self, allocate)
        gammas = round_gammas(problem, solution.allocations)
        return RoundPlan(
            request.round,
            plans,
            gammas,
            next_queues(request.queues, gammas, self.gamma_max),
            self._idle_queues(request),
            solution.certificate,
            next_error_queues(problem, solution.allocations),
        )

    def _idle_queues(self, request: RoundRequest) -> tuple[float, ...]:
        """Return Y_n(t+1) if no unit takes part."""
        idle = (idle_gamma(request.channels, self),) * len(request.queues)
        return next_queues(request.queues, idle, self.gamma_max)


@cache  # the same object for the same limit, because ``solve_cached`` compares solvers
def _exact(max_nodes: int, shares: bool) -> ClusterSolver:
    solve = shared_partition if shares else exact_partition
    return partial(solve, max_nodes=max_nodes)
