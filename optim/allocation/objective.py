"""What a round costs, from its allocations alone: V·makespan plus the drift of the queues."""

from collections.abc import Sequence

from optim.convergence import round_gammas
from optim.problem import Allocation, RoundProblem


def round_objective(problem: RoundProblem, allocations: Sequence[Allocation]) -> float:
    """V·max(pipeline + upload) over the scheduled units, plus ``round_drift``."""
    makespan = max(each.partition.latency_s + each.upload_s for each in allocations)
    return problem.options.drift_weight * makespan + round_drift(problem, allocations)


def round_drift(problem: RoundProblem, allocations: Sequence[Allocation]) -> float:
    """Σ Y_n·Γ_n over all N units, or eq. (32)'s Σ Y_n·(S_n + p_n) over the scheduled ones."""
    queues = problem.queues
    if problem.options.drift == "paper":
        return sum(
            queues[each.unit] * (each.partition.num_segments + each.power_w) for each in allocations
        )
    gammas = round_gammas(problem, allocations)
    return sum(queue * gamma for queue, gamma in zip(queues, gammas, strict=True))
