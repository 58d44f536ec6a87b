"""Options whose power is free: what each costs under drift ``paper``, for every deadline."""

import math
from dataclasses import replace

import numpy as np

from optim.allocation.options import FrontPoints, OptionTable
from optim.problem import Bools, Floats, Ints, RoundProblem
from optim.radio.channel import Fading, required_snr, upload_time

_ROUNDING = 1e-9


class PowerCurves:
    """Feasible options, ordered by unit, channel, payload and point.

    An option costs Y·(S + p(D)) and what its ρ adds to the drift.

    A deadline has to be kept on two lines: once the first micro-batch is through, what is left of
    the uploads follows the pipeline's pace, or the pipeline that of the uploads. Whichever asks for
    the higher rate decides.

    ``options`` are places among all units, channels, payloads and points, of which there are
    ``shape``; ``figures`` all attributes from ``finish_s`` on, [15, O]: one array, since a search
    takes some of the options over and over.
    """

    def __init__(
        self, options: Ints, shape: tuple[int, ...], figures: Floats, fading: Fading
    ) -> None:
        self.options, self.shape, self.figures, self.fading = options, shape, figures, fading
        (
            self.finish_s,  # the first deadline that an option can keep, at full power
            self.enter_s,  # outside these deadlines another of the front is better, with as many
            self.leave_s,  # segments at most
            self.segments,
            self.error_costs,
            self.floors_w,  # the least power that C11 allows
            self.limits_w,  # p̄
            self.queues,  # Y of the unit
            self.snr_per_watt,  # a
            self.latency_s,  # of its point of the front: the first line begins then
            self.nat_seconds,  # (z/m + θ)·ln 2/B: the nats that a hertz sends until the deadline
            self.fastest_s,  # at full power, too short for the latency to tell it from 0
            self.passed_s,  # Σ: when the second line begins
            self.all_nat_seconds,  # (z + θ)·ln 2/B
            self.all_fastest_s,
        ) = figures
        pairs = options // (shape[2] * shape[3])
        self.starts = _starts(pairs)  # of the options of each pair (n, j)
        self.pairs = pairs[self.starts]  # n·J + j

    def __len__(self) -> int:
        return len(self.options)

    @property
    def places(self) -> tuple[Ints, ...]:
        """Unit n, channel j, payload q and place in the unit's front of each option."""
        return tuple(np.unravel_index(self.options, self.shape))

    def take(self, which: Bools | Ints) -> "PowerCurves":
        """Some of the options."""
        return PowerCurves(self.options[which], self.shape, self.figures[:, which], self.fading)

    def within(self, start_s: float, stop_s: float) -> "PowerCurves":
        """Those that can be of use from a deadline up to, and without, another."""
        if not len(self):
            return self
        # An option with fewer segments that is always in time may cost less even at full power.
        always = np.where(self.finish_s <= start_s, self.segments + self.limits_w, np.inf)
        starts = _starts(self.options // self.shape[3])  # of those of a payload: ρ is the same
        sizes = np.diff(starts, append=len(self))
        enough = np.repeat(np.minimum.reduceat(always, starts), sizes)
        useful = (self.enter_s < stop_s) & (start_s < self.leave_s)
        return self.take(useful & (self.finish_s < stop_s) & (self.segments <= enough))

    def at(self, deadline_s: float) -> "PowerCurves":
        """Those that can keep one deadline, and are of use for it."""
        useful = (self.enter_s <= deadline_s) & (deadline_s <= self.leave_s)
        return self.take(useful & (self.finish_s <= deadline_s))

    def costs(self, power_w: Floats) -> Floats:
        """What the options add to the drift with these powers."""
        return np.asarray(self.queues * (self.segments + power_w) + self.error_costs)

    def power(self, deadline_s: Floats | float) -> tuple[Floats, Floats]:
        """The least p that finishes by the deadline, or by each option's own; and dp/dD.

        p(D) falls and is convex for D from ``finish_s`` on.
        """
        sends = self.all_nat_seconds > 0
        left = np.maximum(deadline_s - self.latency_s, self.fastest_s)
        all_left = np.maximum(deadline_s - self.passed_s, self.all_fastest_s)
        left, all_left = np.where(sends, left, 1.0), np.where(sends, all_left, 1.0)
        first, second = self.nat_seconds / left, self.all_nat_seconds / all_left
        seconds = np.where(first > second, left, all_left)
        nats = np.where(sends, np.maximum(first, second), 1.0)
        snr, growth = required_snr(nats, self.fading)
        power = snr / self.snr_per_watt
        slope = -growth * nats / (seconds * self.snr_per_watt)
        power = np.where(sends, power, 0.0)  # nothing to send takes no power
        slope = np.where(power > self.floors_w, slope, 0.0)
        return np.minimum(np.maximum(power, self.floors_w), self.limits_w), slope


def _starts(groups: Ints) -> Ints:
    """Where each group of equal numbers begins; of none at all at 0."""
    return np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1])[: len(groups)]


def feasible_curves(problem: RoundProblem, options: OptionTable) -> PowerCurves:
    """All feasible options of the problem."""
    pairs, of, finish = options.pairs, options.points, options.finish_s.transpose(2, 3, 0, 1)
    places = np.flatnonzero(np.isfinite(finish))
    units, channels, payloads, points = each = np.unravel_index(places, finish.shape)
    at = payloads, units, channels
    point, link = of.at(points, units), pairs.at(*at)
    share = 1 / point.num_micro_batches
    activation_bits = link.upload_bits - link.model_bits
    first_bits = activation_bits * share + link.model_bits
    rates = link.rates(options.limits_w[at])
    nats_per_bit = math.log(2) / link.bandwidth_hz
    figures = (
        finish[each],
        *_useful(point, activation_bits, link.model_bits),
        point.segments,
        options.error_costs[payloads, units, 0],
        options.floors_w[payloads, points, units, channels],
        options.limits_w[at],
        np.array(problem.queues)[units],
        link.snr_per_watt,
        point.latency_s,
        first_bits * nats_per_bit,
        upload_time(first_bits, rates),
        point.latency_s - (point.num_micro_batches - 1) * point.slowest_s,
        link.upload_bits * nats_per_bit,
        upload_time(link.upload_bits, rates),
    )
    return PowerCurves(places, finish.shape, np.array(figures), pairs.fading)


def _useful(
    point: FrontPoints, activation_bits: Floats, model_bits: Floats
) -> tuple[Floats, Floats]:
    """The deadlines that belong to the ends of each point's range of times on the uplink."""
    sends, bounded = activation_bits > 0, np.isfinite(point.last_s)
    model_share = model_bits / np.where(sends, activation_bits, 1.0)
    last_s = np.where(bounded, point.last_s, 0.0)
    enter, leave = (point.finish(end, end * model_share) for end in (point.first_s, last_s))
    enter, leave = np.where(sends, enter, 0.0), np.where(sends & bounded, leave, np.inf)
    return enter * (1 - _ROUNDING), leave * (1 + _ROUNDING)


def relaxed_curves(problem: RoundProblem, options: OptionTable) -> PowerCurves:
    """Each point of a front on one channel that has the best figures of all that are feasible.

    Without fading, which only asks for more power: the costs are bounds for all channels.
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
    return feasible_curves(problem, one_channel)
