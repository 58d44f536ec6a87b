"""An inventory's problems, solved, and each answer verified before anybody sees it."""

from dataclasses import dataclass, fields, replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.inventory.file import Cluster, Inventory
from collapipe.inventory.radio import RoundFigures
from optim.problem import (
    Allocation,
    ClusterProblem,
    ClusterSolution,
    Partition,
    RoundOptions,
    RoundProblem,
    RoundSolution,
)
from optim.solvers import cluster_solver, round_solver
from optim.verify import verify_cluster, verify_round

EXACT = "exact"
_SEED = 0  # of the one baseline that draws its devices


@dataclass(frozen=True, slots=True)
class JointRound:
    """The round's problem over all clusters, and its answer."""

    problem: RoundProblem
    solution: RoundSolution

    def of(self, unit: int) -> Allocation | None:
        """What the unit gets; None: it sits this round out."""
        return next((a for a in self.solution.allocations if a.unit == unit), None)


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that was asked and answered, verified; lists are in the clusters' order."""

    inventory: Inventory
    solver: str
    problems: tuple[ClusterProblem, ...]
    solutions: tuple[ClusterSolution, ...]
    round: JointRound | None

    def partition(self, unit: int) -> Partition:
        """What the cluster does: the round's choice, or its fastest where no round chose."""
        allocation = self.round.of(unit) if self.round else None
        return allocation.partition if allocation else self.solutions[unit].best


def decide(inventory: Inventory, solver: str) -> Decision:
    """Plan every cluster, and the round where the inventory has channels.

    Raises ``ConfigError`` where no plan exists.
    """
    problems = tuple(
        ClusterProblem(
            cluster.devices,
            inventory.num_blocks,
            inventory.batch_size,
            inventory.max_micro_batches,
            inventory.latency,
        )
        for cluster in inventory.clusters
    )
    solutions = tuple(
        _solve_cluster(inventory, cluster, problem, solver)
        for cluster, problem in zip(inventory.clusters, problems, strict=True)
    )
    joint = _solve_round(inventory, solutions, solver) if inventory.channels else None
    return Decision(inventory, solver, problems, solutions, joint)


def _solve_cluster(
    inventory: Inventory, cluster: Cluster, problem: ClusterProblem, solver: str
) -> ClusterSolution:
    try:
        solution = cluster_solver(solver)(problem, np.random.default_rng(_SEED))
    except InfeasibleRoundError as error:
        from collapipe.cli.plan.infeasible import no_room

        short = no_room(problem, cluster, inventory.block_bytes)
        raise short or cluster.section.fault(str(error)) from error
    verify_cluster(solution, problem)
    return solution


def _solve_round(
    inventory: Inventory, solutions: tuple[ClusterSolution, ...], solver: str
) -> JointRound:
    uplinks = (cluster.uplink for cluster in inventory.clusters)
    problem = RoundProblem(
        fronts=tuple(solution.front for solution in solutions),
        uplinks=tuple(uplink for uplink in uplinks if uplink is not None),
        channels=inventory.channels,
        queues=inventory.round.queues,
        num_blocks=inventory.num_blocks,
        options=_options(inventory.round),
    )
    try:
        solution = round_solver(solver)(problem)
    except InfeasibleRoundError as error:
        from collapipe.cli.plan.infeasible import no_upload

        raise no_upload(inventory, problem, str(error)) from error
    verify_round(solution, problem)
    return JointRound(problem, solution if solver == EXACT else _without_proof(solution, solver))


def _without_proof(solution: RoundSolution, solver: str) -> RoundSolution:
    """What is proved among a baseline's splits proves nothing about all splits."""
    certificate = replace(solution.certificate, lower_bound=0.0, solver=solver)
    return replace(solution, certificate=certificate)


def _options(figures: RoundFigures) -> RoundOptions:
    names = {field.name for field in fields(figures)} - {"queues"}
    return RoundOptions(**{name: getattr(figures, name) for name in names})
