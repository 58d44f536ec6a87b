"""Verify a round's answer: constraints C3 to C8, C11, upload times, objective and certificate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optim.problem import Floats
from optim.round.problem import Allocation, RoundProblem, RoundSolution
from optim.verify import radio
from optim.verify.tolerance import TOLERANCE, check_certificate, differs, exceeds, violation


def verify_round(solution: RoundSolution, problem: RoundProblem) -> None:
    """Check the scheduled units, their channels, powers and partitions, and the certificate.

    Partitions must be points of the problem's fronts; ``verify_cluster`` checks the fronts.

    Raises ``PlanViolationError`` with the constraint that fails, the unit and the numbers.
    """
    chosen = solution.allocations
    if not chosen:
        raise violation("C4", "no unit has a channel")
    for place, given in enumerate(chosen):
        _check_place(given, chosen[:place], problem)
    units = scheduled_units(chosen, problem)
    _check_radio(chosen, units, problem)
    _check_number(len(chosen), problem)
    idle = radio.idle_penalties(problem)
    idle[[given.unit for given in chosen]] = 0.0
    drift = float(np.sum(units.penalties) + np.sum(idle))
    makespan = float(np.max(units.finish_s))
    check_certificate(solution.certificate, problem.options.drift_weight * makespan + drift)


@dataclass(frozen=True, slots=True)
class ScheduledUnits:
    """Computed figures of the scheduled units on their channels, [A] each."""

    pairs: radio.UplinkPairs
    upload_s: Floats
    energy_j: Floats
    gammas: Floats
    finish_s: Floats  # end of pipeline and upload
    penalties: Floats  # drift of each unit


def scheduled_units(chosen: Sequence[Allocation], problem: RoundProblem) -> ScheduledUnits:
    """Compute the figures of all allocations."""
    units, channels, segments, m = np.array(
        [
            (each.unit, each.channel, each.partition.num_segments, each.partition.num_micro_batches)
            for each in chosen
        ]
    ).T
    power_w, latencies, slowest = np.array(
        [(each.power_w, each.partition.latency_s, each.partition.slowest_s) for each in chosen]
    ).T
    sent = {each.unit: each.payload for each in chosen}
    payloads = [sent.get(unit) for unit in range(len(problem.uplinks))]
    pairs = radio.pairs_of(problem, units, channels, payloads)
    upload_s = radio.uploads(pairs, power_w, problem.options)
    finish_s = radio.finishes(latencies, slowest, m, pairs, power_w, problem.options)
    return ScheduledUnits(
        pairs,
        upload_s,
        radio.energies(pairs, power_w, problem.options),
        radio.gammas(pairs, power_w, segments, problem),
        finish_s,
        radio.penalties(units, pairs, power_w, segments, problem),
    )


def _check_place(given: Allocation, before: Sequence[Allocation], problem: RoundProblem) -> None:
    unit, channel = given.unit, given.channel
    if unit not in range(len(problem.uplinks)):
        raise violation("C3", f"unit {unit}: the problem has {len(problem.uplinks)} units")
    if channel not in range(len(problem.channels)):
        count = len(problem.channels)
        raise violation("C3", f"unit {unit} on channel {channel}: the problem has {count} channels")
    for other in before:
        if other.unit == unit:
            raise violation("C4", f"unit {unit} on channel {channel} and on {other.channel}")
        if other.channel == channel:
            raise violation("C5", f"channel {channel} for unit {unit} and for {other.unit}")
        if other.unit > unit:
            raise violation("order", f"unit {unit} follows unit {other.unit}, units must ascend")
    if given.payload not in radio.allowed_payloads(problem, unit):
        raise violation("payload", f"unit {unit} sends {given.payload}, which is not allowed")
    head = given.payload.head if given.payload else None
    if given.partition.head != head:
        raise violation(
            "head", f"unit {unit}: head on {given.partition.head}, its payload is for {head}"
        )
    if given.partition not in problem.fronts[unit]:
        raise violation(
            "C1", f"unit {unit}: blocks {given.partition.blocks} are not a point of its front"
        )


def _check_radio(
    chosen: Sequence[Allocation], units: ScheduledUnits, problem: RoundProblem
) -> None:
    for i, given in enumerate(chosen):
        sender = f"unit {given.unit} on channel {given.channel}"
        limit_w, limit_j = units.pairs.max_power_w[i], units.pairs.energy_j[i]
        joules, seconds, gamma = units.energy_j[i], units.upload_s[i], units.gammas[i]
        if not given.power_w >= 0 or exceeds(given.power_w, limit_w):
            raise violation("C6", f"{sender} sends with {given.power_w:.12g} W of {limit_w:.12g} W")
        if exceeds(joules, limit_j):
            raise violation("C8", f"{sender} sends {joules:.12g} J, its limit is {limit_j:.12g} J")
        if not math.isfinite(seconds) or differs(given.upload_s, seconds):
            raise violation(
                "upload time",
                f"{given.upload_s:.12g} s for {sender} with {given.power_w:.12g} W; "
                f"eq. 11 gives {seconds:.12g} s",
            )
        if not math.isfinite(units.finish_s[i]) or differs(given.finish_s, units.finish_s[i]):
            raise violation(
                "finish",
                f"{given.finish_s:.12g} s for {sender}, expected {units.finish_s[i]:.12g} s",
            )
        if problem.options.hard_gamma and exceeds(gamma, problem.options.gamma_max):
            raise violation(
                "C11", f"{sender} has Γ={gamma:.12g}, the limit is {problem.options.gamma_max:.12g}"
            )


def _check_number(scheduled: int, problem: RoundProblem) -> None:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    # Each scheduled pair was checked, so more than the maximum is impossible. The factor excludes
    # pairs that only rounding makes feasible.
    feasible = radio.feasible(problem, 1 - 2 * TOLERANCE)
    possible = int(np.count_nonzero(maximum_bipartite_matching(csr_array(feasible)) >= 0))
    if scheduled < possible:
        raise violation(
            "C4", f"{scheduled} units have a channel, {possible} feasible pairs can be matched"
        )
