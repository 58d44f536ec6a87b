"""Costs of options under drift ``paper`` as functions of the deadline, if their power is free."""

import math
from dataclasses import replace

import numpy as np

from optim.allocation.options import FrontPoints, OptionTable
from optim.problem import Bools, Floats, Ints
from optim.round.channel import required_snr
from optim.round.problem import RoundProblem

_ROUNDING = 1e-9


class PowerCurves:
    """Costs of loads on each of J channels; a load is a unit's payload with a point of its front.

    A load costs Y·(S + p(D)) on a channel, plus the drift of its rounding error ρ.

    Two constraints bind under a deadline: after the first micro-batch either the pipeline or the
    uplink sets the pace. The constraint with the higher required rate decides.

    ``loads`` are ascending flat indices into ``shape``: intervals of deadlines (a search holds
    several), units, payloads and points. ``figures`` [9, R, 1] do not depend on the channel,
    ``links`` [6, R, J] do.
    """

    def __init__(
        self, loads: Ints, shape: tuple[int, ...], figures: Floats, links: Floats, fading: str
    ) -> None:
        self.loads, self.shape, self.figures, self.links = loads, shape, figures, links
        self.fading = fading
        (
            self.enter_s,  # outside of these deadlines another point of the front with at most as
            self.leave_s,  # many segments is better
            self.segments,
            self.error_costs,
            self.queues,  # Y of the unit
            self.latency_s,  # latency of its point; the first constraint's sending begins then
            self.nat_bits,  # (z/m + θ)·ln 2: the nats that are sent until the deadline
            self.passed_s,  # Σ; the second constraint's sending begins then
            self.all_nat_bits,  # (z + θ)·ln 2
        ) = figures
        (
            self.finish_s,  # the earliest feasible deadline, at full power; infinite if none
            self.floors_w,  # the least power that C11 allows
            self.limits_w,  # p̄
            self.snr_per_watt,  # a
            self.bandwidth_hz,
            self.most_nats,  # nats per second at full power
        ) = links
        self.intervals = loads // math.prod(shape)
        self.starts = _starts(loads // math.prod(shape[1:]))  # the first load of each unit

    def __len__(self) -> int:
        return len(self.loads)

    @property
    def places(self) -> tuple[Ints, ...]:
        """Unit n, payload q and index into the unit's front of each load."""
        return tuple(np.unravel_index(self.loads % math.prod(self.shape), self.shape))

    def take(self, which: Bools | Ints) -> "PowerCurves":
        """Select some of the loads."""
        figures, links = self.figures[:, which], self.links[:, which]
        return PowerCurves(self.loads[which], self.shape, figures, links, self.fading)

    def on(self, which: Ints, channels: Ints) -> "PowerCurves":
        """Select some of the loads, each on one channel."""
        figures, links = self.figures[:, which], self.links[:, which, channels, np.newaxis]
        return PowerCurves(self.loads[which], self.shape, figures, links, self.fading)

    def among(self, which: Ints, intervals: Ints) -> "PowerCurves":
        """Select loads and assign them to other intervals, in the order of ``intervals``."""
        size, figures, links = math.prod(self.shape), self.figures[:, which], self.links[:, which]
        loads = self.loads[which] % size + intervals * size
        return PowerCurves(loads, self.shape, figures, links, self.fading)

    def useful(self, start_s: Floats | float, stop_s: Floats | float) -> Bools:
        """Whether each load can be useful on some channel for deadlines in [start, stop), [R].

        Deadlines of shape [E, 1] give an array [E, R].
        """
        enter, leave, finish = self.enter_s[:, 0], self.leave_s[:, 0], self.finish_s.min(axis=1)
        return np.asarray((enter < stop_s) & (start_s < leave) & (finish < stop_s))

    def costs(self, power_w: Floats) -> Floats:
        """The drift that the loads add with these powers, [R, J]."""
        return np.asarray(self.queues * (self.segments + power_w) + self.error_costs)

    def power(self, deadline_s: Floats | float) -> tuple[Floats, Floats]:
        """Return the least power p that finishes by the deadline D, and dp/dD, broadcast over
        [R, J].

        p(D) decreases and is convex for D ≥ ``finish_s``.
        """
        sends = self.all_nat_bits > 0
        # The remaining time may be too small to differ from 0 by rounding.
        left = np.maximum(deadline_s - self.latency_s, self.nat_bits / self.most_nats)
        all_left = np.maximum(deadline_s - self.passed_s, self.all_nat_bits / self.most_nats)
        left, all_left = np.where(sends, left, 1.0), np.where(sends, all_left, 1.0)
        first, second = self.nat_bits / left, self.all_nat_bits / all_left
        seconds = np.where(first > second, left, all_left)
        nats = np.where(sends, np.maximum(first, second) / self.bandwidth_hz, 1.0)
        snr, growth = required_snr(nats, self.fading)
        power = snr / self.snr_per_watt
        slope = -growth * nats / (seconds * self.snr_per_watt)
        power = np.where(sends, power, 0.0)  # nothing to send takes no power
        slope = np.where(power > self.floors_w, slope, 0.0)
        return np.minimum(np.maximum(power, self.floors_w), self.limits_w), slope

    @property
    def bends_s(self) -> Floats:
        """Deadlines at which both constraints require the same rate, [R, 1]; NaN if one always
        decides."""
        later = self.all_nat_bits - self.nat_bits
        bends = self.all_nat_bits * self.latency_s - self.nat_bits * self.passed_s
        decided = np.full(later.shape, np.nan)
        return np.asarray(np.divide(bends, later, out=decided, where=later > 0))


def _starts(groups: Ints) -> Ints:
    """Return the index at which each group of equal numbers begins; empty without numbers."""
    return np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])[: len(groups)]


def power_curves(problem: RoundProblem, options: OptionTable, loads: Ints) -> PowerCurves:
    """Make the curves of some of the problem's loads on each channel."""
    num_payloads, num_points, num_units, _ = options.finish_s.shape
    shape = num_units, num_payloads, num_points
    units, payloads, points = np.unravel_index(loads % math.prod(shape), shape)
    pairs, at, of_points = options.pairs, (payloads, units), (payloads, points, units)
    point = options.points.at(points, units)
    model_bits, upload_bits = pairs.model_bits[..., 0][at], pairs.upload_bits[..., 0][at]
    activation_bits = upload_bits - model_bits
    first_bits = activation_bits / point.num_micro_batches + model_bits
    figures = (
        *_useful(point, activation_bits, model_bits),
        point.segments,
        options.error_costs[(*at, 0)],
        np.array(problem.queues)[units],
        point.latency_s,
        first_bits * math.log(2),
        point.latency_s - (point.num_micro_batches - 1) * point.slowest_s,
        upload_bits * math.log(2),
    )
    finish, bandwidth = options.finish_s[of_points], pairs.bandwidth_hz[at]
    feasible, rates = np.isfinite(finish), pairs.rates(options.limits_w)[at]
    links = (
        finish,
        options.floors_w[of_points],
        options.limits_w[at],
        np.where(feasible, pairs.snr_per_watt[at], 1.0),
        bandwidth,
        np.where(feasible, rates * math.log(2), bandwidth),
    )
    return PowerCurves(
        loads, shape, np.array(figures)[..., np.newaxis], np.array(links), pairs.fading
    )


def _useful(
    point: FrontPoints, activation_bits: Floats, model_bits: Floats
) -> tuple[Floats, Floats]:
    """Convert the ends of each point's range of uplink times to deadlines."""
    sends, bounded = activation_bits > 0, np.isfinite(point.last_s)
    model_share = model_bits / np.where(sends, activation_bits, 1.0)
    last_s = np.where(bounded, point.last_s, 0.0)
    enter, leave = (point.finish(end, end * model_share) for end in (point.first_s, last_s))
    enter, leave = np.where(sends, enter, 0.0), np.where(sends & bounded, leave, np.inf)
    return enter * (1 - _ROUNDING), leave * (1 + _ROUNDING)


def relaxed_curves(problem: RoundProblem, options: OptionTable) -> PowerCurves:
    """Make the curves of all feasible loads on one ideal channel with the best value of each
    property.

    Their costs bound the costs on all channels from below. Fading is ignored, as it only increases
    the power.
    """
    best_link = replace(
        options.pairs,
        bandwidth_hz=options.pairs.bandwidth_hz.max(axis=2, keepdims=True),
        snr_per_watt=options.pairs.snr_per_watt.max(axis=2, keepdims=True),
        fading="none",
    )
    one_channel = replace(
        options,
        pairs=best_link,
        limits_w=options.limits_w.max(axis=2, keepdims=True),
        floors_w=options.floors_w.min(axis=3, keepdims=True),
        finish_s=options.finish_s.min(axis=3, keepdims=True),
    )
    feasible = np.isfinite(one_channel.finish_s[..., 0]).transpose(2, 0, 1)
    return power_curves(problem, one_channel, np.flatnonzero(feasible))
