"""A round's answer: constraints C3 to C8 and C11, upload times, objective and certificate."""

import math
from collections.abc import Sequence

import numpy as np

from optim.problem import Allocation, RoundProblem, RoundSolution
from optim.verify import radio
from optim.verify.objective import objective, powers, scheduled, segments
from optim.verify.tolerance import TOLERANCE, check_certificate, differs, exceeds, violation


def verify_round(solution: RoundSolution, problem: RoundProblem) -> None:
    """Check who is scheduled, where, with which power and partition, and the certificate.

    Partitions must be points of the problem's fronts; whether those are right is
    ``verify_cluster``'s matter.

    Raises
    ------
    PlanViolationError
        With the constraint that fails, the unit and the numbers.
    """
    chosen = solution.allocations
    if not chosen:
        raise violation("C4", "no unit has a channel")
    for place, given in enumerate(chosen):
        _check_place(given, chosen[:place], problem)
    _check_radio(chosen, problem)
    _check_number(len(chosen), problem)
    check_certificate(solution.certificate, objective(chosen, problem))


def _check_place(given: Allocation, before: Sequence[Allocation], problem: RoundProblem) -> None:
    unit, channel = given.unit, given.channel
    if unit not in range(len(problem.uplinks)):
        raise violation("C3", f"unit {unit} is none of {len(problem.uplinks)}")
    if channel not in range(len(problem.channels)):
        raise violation("C3", f"unit {unit} on channel {channel}, none of {len(problem.channels)}")
    for other in before:
        if other.unit == unit:
            raise violation("C4", f"unit {unit} on channel {channel} and on {other.channel}")
        if other.channel == channel:
            raise violation("C5", f"channel {channel} for unit {unit} and for {other.unit}")
        if other.unit > unit:
            raise violation("order", f"unit {unit} comes after unit {other.unit}")
    if given.partition not in problem.fronts[unit]:
        raise violation(
            "C1", f"unit {unit}: blocks {given.partition.blocks} are no point of its front"
        )


def _check_radio(chosen: Sequence[Allocation], problem: RoundProblem) -> None:
    options = problem.options
    pairs, power_w = scheduled(chosen, problem), powers(chosen)
    joules = radio.energies(pairs, power_w, options)
    seconds = radio.uploads(pairs, power_w, options)
    gammas = radio.gammas(pairs, power_w, segments(chosen), problem)
    for i, given in enumerate(chosen):
        who = f"unit {given.unit} on channel {given.channel}"
        limit_w, limit_j = pairs.max_power_w[i], pairs.energy_j[i]
        if not given.power_w >= 0 or exceeds(given.power_w, limit_w):
            raise violation("C6", f"{who} sends with {given.power_w:.12g} W of {limit_w:.12g} W")
        if exceeds(joules[i], limit_j):
            raise violation("C8", f"{who} sends {joules[i]:.12g} J, its limit is {limit_j:.12g} J")
        if not math.isfinite(seconds[i]) or differs(given.upload_s, seconds[i]):
            raise violation(
                "upload time",
                f"{given.upload_s:.12g} s for {who} with {given.power_w:.12g} W, "
                f"eq. 11 gives {seconds[i]:.12g} s",
            )
        if options.hard_gamma and exceeds(gammas[i], options.gamma_max):
            raise violation(
                "C11", f"{who} has Γ={gammas[i]:.12g}, the limit is {options.gamma_max:.12g}"
            )


def _check_number(scheduled: int, problem: RoundProblem) -> None:
    # More cannot be: each pair has been checked. A pair that only rounding makes feasible may lack.
    possible = _matching_size(problem, 1 - 2 * TOLERANCE)
    if scheduled < possible:
        raise violation(
            "C4", f"{scheduled} units have a channel, {possible} feasible pairs can be matched"
        )


def _matching_size(problem: RoundProblem, ease: float) -> int:
    """ν."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    matching = maximum_bipartite_matching(csr_array(radio.feasible(problem, ease)))
    return int(np.count_nonzero(matching >= 0))
