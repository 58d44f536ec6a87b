"""Solve the joint round exactly: units, channels, powers and points of the fronts."""

import math
import time

from optim.allocation.gamma import allocate_gamma
from optim.allocation.options import option_table, round_solution
from optim.allocation.paper_drift import allocate_paper_drift
from optim.problem import RoundProblem, RoundSolution


def exact_allocation(problem: RoundProblem, time_limit_s: float = math.inf) -> RoundSolution:
    """Minimise V·makespan + drift over all rounds that schedule as many units as possible.

    The number of units is ν, the size of the largest matching of feasible pairs of units and
    channels. It is fixed, because fewer units would always cost less. Of points with equal cost,
    the one with the fewest segments is chosen. At the time limit the best round so far is returned
    with a valid lower bound.

    Raises ``InfeasibleRoundError`` like ``option_table``, if ν = 0.
    """
    started = time.perf_counter()
    options = option_table(problem)
    allocate = allocate_gamma if problem.options.drift == "gamma" else allocate_paper_drift
    choice = allocate(problem, options, started + time_limit_s)
    return round_solution(problem, options, choice, "exact", started)
