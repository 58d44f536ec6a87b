"""What a round's answer costs: V·makespan plus the drift of the queues."""

from collections.abc import Sequence

import numpy as np

from optim.problem import Allocation, Floats, Ints, RoundProblem
from optim.verify import radio
from optim.verify.radio import UplinkPairs


def objective(chosen: Sequence[Allocation], problem: RoundProblem) -> float:
    """V·max (pipeline + upload) + Σ Y_n·Γ_n of all units, or Σ Y_n·(S_n + p_n) of the scheduled."""
    idle = idle_penalties(problem)
    idle[[given.unit for given in chosen]] = 0.0
    makespan = float(np.max(finishes(chosen, problem)))
    drift = float(np.sum(chosen_penalties(chosen, problem)) + np.sum(idle))
    return problem.options.drift_weight * makespan + drift


def finishes(chosen: Sequence[Allocation], problem: RoundProblem) -> Floats:
    """Pipeline and upload time of the scheduled units, seconds."""
    latencies = np.array([given.partition.latency_s for given in chosen])
    return latencies + radio.uploads(scheduled(chosen, problem), powers(chosen), problem.options)


def chosen_penalties(chosen: Sequence[Allocation], problem: RoundProblem) -> Floats:
    """What each scheduled unit adds to the drift."""
    queues = np.array(problem.queues)[[given.unit for given in chosen]]
    pairs = scheduled(chosen, problem)
    return penalties(queues, pairs, powers(chosen), segments(chosen), problem)


def penalties(
    queues: Floats, pairs: UplinkPairs, power_w: Floats, num_segments: Ints, problem: RoundProblem
) -> Floats:
    """Y·Γ (drift ``gamma``) or Y·(S + p) (``paper``, eq. 32)."""
    if problem.options.drift == "gamma":
        return queues * radio.gammas(pairs, power_w, num_segments, problem)
    return queues * (num_segments + power_w)


def idle_penalties(problem: RoundProblem) -> Floats:
    """What each unit adds to the drift while it has no channel, [N]."""
    queues = np.array(problem.queues, dtype=float)
    if problem.options.drift == "gamma":
        return queues * radio.idle_gamma(problem)
    return np.zeros_like(queues)


def scheduled(chosen: Sequence[Allocation], problem: RoundProblem) -> UplinkPairs:
    """The pairs that are used, [A]."""
    units = np.array([given.unit for given in chosen])
    return radio.pairs_of(problem, units, np.array([given.channel for given in chosen]))


def powers(chosen: Sequence[Allocation]) -> Floats:
    """p_n, [A], W."""
    return np.array([given.power_w for given in chosen])


def segments(chosen: Sequence[Allocation]) -> Ints:
    """S_n, [A]."""
    return np.array([given.partition.num_segments for given in chosen])
