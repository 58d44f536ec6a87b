"""Options whose power is free: what each costs under drift ``paper``, for every deadline."""

import math
from dataclasses import replace

import numpy as np

from optim.allocation.options import OptionTable
from optim.problem import Bools, Floats, Ints, RoundProblem
from optim.radio.channel import Fading, required_snr


class PowerCurves:
    """Feasible options, ordered by unit, channel and point; an option costs Y·(S + p(D)).

    ``options`` are unit n, channel j and place in the unit's front of each, [3, O], ``figures`` all
    attributes from ``finish_s`` on, [9, O]: one array, since a search takes some of the options
    over and over.
    """

    def __init__(self, options: Ints, figures: Floats, fading: Fading) -> None:
        self.options, self.figures, self.fading = options, figures, fading
        self.units, self.channels, self.points = options
        (
            self.finish_s,  # the first deadline that an option can keep, at full power
            self.latency_s,  # of its point of the front, as the next
            self.segments,
            self.floors_w,  # the least power that C11 allows
            self.limits_w,  # p̄
            self.queues,  # Y of the unit
            self.snr_per_watt,  # a
            self.nat_seconds,  # (z + θ)·ln 2/B: nats a hertz sends in D - latency seconds
            self.fastest_s,  # the upload at full power, too short for the latency to tell it from 0
        ) = figures
        # Where the options of each pair (n, j) begin.
        changes = (options[:2, 1:] != options[:2, :-1]).any(axis=0)
        self.starts: Ints = np.concatenate([[0], np.flatnonzero(changes) + 1])

    def __len__(self) -> int:
        return len(self.units)

    def take(self, which: Bools | Ints) -> "PowerCurves":
        """Some of the options."""
        return PowerCurves(self.options[:, which], self.figures[:, which], self.fading)

    def within(self, start_s: float, stop_s: float) -> "PowerCurves":
        """Those that can be of use from a deadline up to, and without, another."""
        if not len(self):
            return self
        # An option with fewer segments that is always in time may cost less even at full power.
        always = np.where(self.finish_s <= start_s, self.segments + self.limits_w, np.inf)
        sizes = np.diff(self.starts, append=len(self))
        enough = np.repeat(np.minimum.reduceat(always, self.starts), sizes)
        return self.take((self.finish_s < stop_s) & (self.segments <= enough))

    def power(self, deadline_s: Floats | float) -> tuple[Floats, Floats]:
        """The least p that finishes by the deadline, or by each option's own; and dp/dD.

        p(D) falls and is convex for D from ``finish_s`` on.
        """
        sends = self.nat_seconds > 0
        seconds = np.where(sends, np.maximum(deadline_s - self.latency_s, self.fastest_s), 1.0)
        nats = np.where(sends, self.nat_seconds, 1.0) / seconds
        snr, growth = required_snr(nats, self.fading)
        power = snr / self.snr_per_watt
        slope = -growth * nats / (seconds * self.snr_per_watt)
        power = np.where(sends, power, 0.0)  # nothing to send takes no power
        slope = np.where(power > self.floors_w, slope, 0.0)
        return np.minimum(np.maximum(power, self.floors_w), self.limits_w), slope


def feasible_curves(problem: RoundProblem, options: OptionTable) -> PowerCurves:
    """All feasible options of the problem."""
    pairs, finish = options.pairs, np.moveaxis(options.finish_s, 0, 2)
    units, channels, points = places = np.array(np.nonzero(np.isfinite(finish)))
    at = units, channels
    figures = (
        finish[units, channels, points],
        options.latency_s[points, units, 0],
        options.segments[points, units, 0],
        options.floors_w[points, units, channels],
        options.limits_w[at],
        np.array(problem.queues)[units],
        pairs.snr_per_watt[at],
        pairs.upload_bits[at] * math.log(2) / pairs.bandwidth_hz[at],
        options.uploads_s[at],
    )
    return PowerCurves(places, np.array(figures), pairs.fading)


def relaxed_curves(problem: RoundProblem, options: OptionTable) -> PowerCurves:
    """Each point of a front on one channel that has the best figures of all that are feasible.

    Without fading, which only asks for more power: the costs are bounds for all channels.
    """
    best_link = replace(
        options.pairs,
        bandwidth_hz=options.pairs.bandwidth_hz.max(axis=1, keepdims=True),
        snr_per_watt=options.pairs.snr_per_watt.max(axis=1, keepdims=True),
        fading="none",
    )
    one_channel = replace(
        options,
        pairs=best_link,
        limits_w=options.limits_w.max(axis=1, keepdims=True),
        floors_w=options.floors_w.min(axis=2, keepdims=True),
        uploads_s=options.uploads_s.min(axis=1, keepdims=True),
        finish_s=options.finish_s.min(axis=2, keepdims=True),
    )
    return feasible_curves(problem, one_channel)
