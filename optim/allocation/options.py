"""What each unit could do on each channel: the choices of a round, as arrays."""

from dataclasses import dataclass

import numpy as np

from optim.convergence import gamma_power
from optim.problem import Floats, Ints, Partition, RoundProblem
from optim.radio.channel import Links, links, power_limits, uplink_rate, upload_time


@dataclass(frozen=True, slots=True)
class OptionTable:
    """Option (s, n, j): unit n trains with the s-th point of its front and uploads on channel j.

    Attributes
    ----------
    pairs
        The links of all (n, j).
    latency_s, segments
        Of the fronts' points, [S, N, 1]; infinite and 0 where a front has fewer points.
    limits_w
        p̄, the highest power, [N, J]; 0 where the pair is infeasible at any power.
    floors_w
        The least power that keeps C11, [S, N, J]; zeros where it is not asked.
    uploads_s
        At p̄, [N, J]; infinite where the pair is infeasible.
    finish_s
        Pipeline and upload at p̄, [S, N, J]; infinite where the option is infeasible.
    """

    pairs: Links
    latency_s: Floats
    segments: Floats
    limits_w: Floats
    floors_w: Floats
    uploads_s: Floats
    finish_s: Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """A solver's answer: of each scheduled unit its channel, point of the front and power.

    ``bound``: no choice has a lower objective, up to rounding.
    """

    units: Ints
    channels: Ints
    points: Ints
    powers_w: Floats
    bound: float


def option_table(problem: RoundProblem) -> OptionTable:
    """All options of a round of N units and J channels."""
    pairs = links(problem.uplinks, problem.channels, problem.options.fading)
    limits = power_limits(pairs)
    rates = uplink_rate(limits, pairs.gains, pairs.bandwidth_hz, pairs.noise_w, pairs.fading)
    uploads = np.where(limits > 0, upload_time(pairs.upload_bits, rates), np.inf)
    latency, segments = _points(problem.fronts)
    finish, floors = latency + uploads, np.zeros(latency.shape[:2] + limits.shape[1:])
    if problem.options.hard_gamma:
        floors = gamma_power(segments, pairs.gains, pairs.interference_w, problem)
        finish = np.where(floors <= limits, finish, np.inf)
    return OptionTable(pairs, latency, segments, limits, floors, uploads, finish)


def _points(fronts: tuple[tuple[Partition, ...], ...]) -> tuple[Floats, Floats]:
    """Latencies and S of the fronts, [S, N, 1] each."""
    most = max(map(len, fronts), default=0)
    latency = np.full((len(fronts), most), np.inf)
    segments = np.zeros((len(fronts), most))
    for unit, front in enumerate(fronts):
        latency[unit, : len(front)] = [point.latency_s for point in front]
        segments[unit, : len(front)] = [point.num_segments for point in front]
    return latency.T[:, :, np.newaxis], segments.T[:, :, np.newaxis]
