"""The joint round, exactly: which units, which channel and power, which point of each front."""

import math
import time

import numpy as np

from collapipe.plan import Certificate
from optim.allocation.gamma import allocate_gamma
from optim.allocation.infeasible import infeasible_round
from optim.allocation.objective import round_objective
from optim.allocation.options import Choice, OptionTable, option_table
from optim.allocation.paper_drift import allocate_paper_drift
from optim.problem import Allocation, RoundProblem, RoundSolution
from optim.radio.channel import uplink_rate, upload_time


def exact_allocation(problem: RoundProblem, time_limit_s: float = math.inf) -> RoundSolution:
    """The least V·makespan + drift of all rounds that schedule as many units as possible.

    That many is ν, the largest matching of units and channels that are feasible together: fewer
    would be cheaper, none the cheapest. Of points that cost the same, the fewest segments.

    Parameters
    ----------
    time_limit_s
        When it is over, the best round found so far is returned, with its true lower bound.

    Raises
    ------
    InfeasibleRoundError
        Where ν = 0: names the constraint, the numbers, and what would be enough.
    """
    start = time.perf_counter()
    options = option_table(problem)
    if not np.isfinite(options.finish_s).any():
        raise infeasible_round(problem, options)
    allocate = allocate_gamma if problem.options.drift == "gamma" else allocate_paper_drift
    choice = allocate(problem, options, start + time_limit_s)
    allocations = _allocations(problem, options, choice)
    objective = round_objective(problem, allocations)
    return RoundSolution(
        allocations,
        Certificate(objective, min(choice.bound, objective), "exact", time.perf_counter() - start),
    )


def _allocations(
    problem: RoundProblem, options: OptionTable, choice: Choice
) -> tuple[Allocation, ...]:
    """What each scheduled unit gets, in the units' order."""
    pairs, units, channels = options.pairs, choice.units, choice.channels
    rates = uplink_rate(
        choice.powers_w,
        pairs.gains[units, channels],
        pairs.bandwidth_hz[channels],
        pairs.noise_w[channels],
        pairs.fading,
    )
    uploads = upload_time(pairs.upload_bits[units, 0], rates)
    return tuple(
        Allocation(unit, channel, power, upload, problem.fronts[unit][point])
        for unit, channel, power, upload, point in zip(
            units.tolist(),
            channels.tolist(),
            choice.powers_w.tolist(),
            uploads.tolist(),
            choice.points.tolist(),
            strict=True,
        )
    )
