"""The joint round, exactly: which units, which channel and power, which point of each front."""

import math
import time

from optim.allocation.gamma import allocate_gamma
from optim.allocation.options import option_table, round_solution
from optim.allocation.paper_drift import allocate_paper_drift
from optim.problem import RoundProblem, RoundSolution


def exact_allocation(problem: RoundProblem, time_limit_s: float = math.inf) -> RoundSolution:
    """The least V·makespan + drift of all rounds that schedule as many units as possible.

    That many is ν, the largest matching of units and channels that are feasible together: fewer
    would be cheaper, none the cheapest. Of points that cost the same, the fewest segments. When the
    time limit is over, the best round found so far is returned, with its true lower bound.

    Raises ``InfeasibleRoundError`` as ``option_table`` does, where ν = 0.
    """
    started = time.perf_counter()
    options = option_table(problem)
    allocate = allocate_gamma if problem.options.drift == "gamma" else allocate_paper_drift
    choice = allocate(problem, options, started + time_limit_s)
    return round_solution(problem, options, choice, "exact", started)
