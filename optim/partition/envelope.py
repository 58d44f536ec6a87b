"""The fastest partitions of each S as a function of the uplink time, and goals for faster ones.

If a batch's activations take a seconds on the uplink, a partition with sum Σ and slowest stage M
takes Σ + A + (m - 1)·max(M, A) seconds, A = a/m. As a function of a this is the maximum of two
lines that meet at a = m·M. The minimum over all partitions with at most S segments is their lower
envelope.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.partition.rates import MOST_TINY_S, PROGRESS, Rates, batch_seconds
from optim.problem import Floats, Ints

_WIDE = 1e3  # samples of a range start at least at its end divided by this
_SAMPLES = 3  # number of samples of separate times


@dataclass(frozen=True, slots=True)
class Splits:
    """Partitions, [N] each."""

    segments: Ints  # S
    row: Ints  # m - 1
    total: Floats  # Σ, s
    slowest: Floats  # M, s
    blocks: Ints  # δ, [N, K]

    @classmethod
    def of(cls, rates: Rates, row: Ints, blocks: Floats) -> "Splits":
        """Make feasible partitions, with their times under the law of ``rates``."""
        used = blocks > 0
        segments = used.sum(axis=1)
        slowest = np.where(used, rates.bottleneck(row, blocks), 0).max(axis=1)
        slowest[slowest < MOST_TINY_S] = 0.0  # all devices in use take no time
        if rates.paced:
            total = segments * slowest
        else:
            chunk = rates.per_block[row] * blocks + np.where(used, rates.hop[row], 0)
            total = np.where(slowest > 0, chunk.sum(axis=1), 0.0)
        slowest = np.maximum(slowest, rates.floor[row])
        return cls(segments, row, total + rates.after_uplink[row], slowest, blocks.astype(int))

    def where(self, keep: Ints) -> "Splits":
        """Select some of the partitions."""
        return Splits(*(each[keep] for each in self._arrays()))

    def __add__(self, other: "Splits") -> "Splits":
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        return Splits(*(np.concatenate(pair) for pair in pairs))

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.segments, self.row, self.total, self.slowest, self.blocks

    def latency(self, activation_s: Floats, places: Ints) -> Floats:
        """Return the seconds of a batch of the splits at ``places``, broadcast."""
        of = self.total[places], self.slowest[places], self.row[places]
        return batch_seconds(*of, activation_s)


@dataclass(slots=True)
class Envelope:
    """The best of the splits offered so far, for each S and each requested uplink time a.

    The requested times are ``times``, ascending; if ``continuous``, the last two are the ends of a
    range, and all times between them are requested.
    """

    times: Floats
    continuous: bool
    max_segments: int
    splits: Splits
    # The split of each S and piece, [S, Q], padded with the last one, or -1 without splits; and the
    # start of each piece, padded with infinity. A separate time is a piece.
    piece: Ints = field(init=False)
    start: Floats = field(init=False)
    # All starts of pieces, and the end of a range, [Q', S]; and the envelope's values there,
    # infinite without splits.
    knot: Floats = field(init=False)
    value: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._rebuild()

    def offer(self, splits: Splits) -> None:
        """Add the splits that improve the envelope."""
        goals, own = self.goal(splits.row, splits.slowest), np.arange(len(splits.row))
        better = np.flatnonzero(splits.total < goals[own, splits.segments - 1])
        if len(better):
            self.splits = self.splits + splits.where(better)
            self._rebuild()

    def goal(self, row: Ints, slowest: Floats) -> Floats:
        """Return the bound of Σ below which a split improves the envelope, [N, Smax] s, if M is
        ``slowest`` [N].

        A split improves it if it is the fastest with at most S segments for some requested a.
        Between two knots the envelope is one split's time. The new split gains most at a knot, or
        at the a where its two lines meet.
        """
        goal = np.full((len(row), self.max_segments), -np.inf)
        waited = np.where(row > 0, slowest, 0.0)[:, None]  # which may be infinite
        for knot, value in zip(self.knot, self.value * (1 - PROGRESS), strict=True):
            each = knot / (row + 1)[:, None]
            added = np.maximum(waited, each)
            added *= row[:, None]
            added += each
            np.maximum(goal, value - added, out=goal)
        if not (self.continuous and len(self.splits.row)):
            return goal
        bend = (row + 1) * slowest
        inside = (self.times[-2] < bend) & (bend < self.times[-1])
        if inside.any():
            at_bend = self._values_at(bend[inside]) * (1 - PROGRESS) - bend[inside, None]
            goal[inside] = np.maximum(goal[inside], at_bend)
        return goal

    def samples(self) -> list[float]:
        """Return some of the requested uplink times; partitions best there are good nearby."""
        separate = self._separate
        some = np.linspace(0, len(separate) - 1, min(len(separate), _SAMPLES)).astype(int)
        found: list[float] = separate[some].tolist()
        if not self.continuous:
            return found
        low, high = self.times[-2:].tolist()
        if low == high:
            return [*found, low]
        first = max(low, high / _WIDE)
        between = np.geomspace(first, high, 2 + int(2 * math.log2(high / first)))
        return [*found, low, *between[1:].tolist()]

    @property
    def _separate(self) -> Floats:
        """The requested times outside of a range."""
        return self.times[: -2 if self.continuous else None]

    @property
    def least(self) -> float:
        """The smallest time of all splits for the first a, s."""
        return float(self.value[0].min())

    def front(self) -> tuple[Splits, Floats]:
        """Return all splits that are the fastest with at most their S for some a, by S, then by a.

        Also return the interval of a for which each is the fastest, [N, 2]; the last one has no
        end. The first of equally fast splits represents the others.
        """
        chosen, ranges = list[int](), list[tuple[float, float]]()
        for size, (pieces, starts) in enumerate(zip(self.piece, self.start, strict=True), start=1):
            ends = np.append(starts[1:], np.inf)
            ends[: len(self._separate)] = starts[: len(self._separate)]
            for place in dict.fromkeys(pieces.tolist()):
                if place >= 0 and self.splits.segments[place] == size:
                    (own,) = np.nonzero((pieces == place) & np.isfinite(starts))
                    chosen.append(place)
                    ranges.append((float(starts[own[0]]), float(ends[own[-1]])))
        if not self.continuous:
            ranges = [(0.0, math.inf)] * len(chosen)
        return self._without_equals(np.array(chosen, dtype=int), ranges)

    def _without_equals(
        self, chosen: Ints, ranges: list[tuple[float, float]]
    ) -> tuple[Splits, Floats]:
        """Drop splits that are never faster than an earlier one, which gets their interval."""
        splits, times = self.splits.where(chosen), self.times
        if self.continuous:  # two splits differ most at their bends
            bends = np.maximum((splits.row + 1) * splits.slowest, times[-2])
            times = np.append(times[:-1], bends)
        seconds, kept = self.splits.latency(times[:, None], chosen), list[int]()
        for place, own in enumerate(seconds.T):
            equal = [q for q in kept if (seconds[:, q] <= own * (1 + PROGRESS)).all()]
            if equal:
                (first, last), (start, end) = ranges[equal[0]], ranges[place]
                ranges[equal[0]] = min(first, start), max(last, end)
            else:
                kept.append(place)
        return splits.where(np.array(kept, dtype=int)), np.array([ranges[q] for q in kept])

    def _values_at(self, activation_s: Floats) -> Floats:
        """Return the envelope's values, [N, Smax], for times a of shape [N] or [N, Smax]."""
        if not len(self.splits.row):
            return np.full((len(activation_s), self.max_segments), np.inf)
        activation_s = activation_s.reshape(len(activation_s), -1)
        place = (self.start <= activation_s[:, :, None]).sum(axis=2) - 1
        piece = self.piece[np.arange(self.max_segments), np.maximum(place, 0)]
        return np.where(piece >= 0, self.splits.latency(activation_s, piece), np.inf)

    def _rebuild(self) -> None:
        """Rebuild the envelope of each S from that of S - 1 and the splits with S segments."""
        pieces, starts = list[Ints](), list[Floats]()
        before = np.zeros(0, dtype=int)
        for size in range(1, self.max_segments + 1):
            own = np.flatnonzero(self.splits.segments == size)
            if len(own) or not starts:
                pool = np.concatenate([before, own])
                before, start = self._fastest(pool)
            pieces.append(before)
            starts.append(start)
        kept = np.unique(np.concatenate(pieces))
        self.splits = self.splits.where(kept)
        most = max(1, *map(len, pieces))
        self.piece = np.full((self.max_segments, most), -1)
        self.start = np.full((self.max_segments, most), np.inf)
        for size, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
            self.piece[size] = np.searchsorted(kept, np.resize(piece, most)) if len(piece) else -1
            self.piece[size, len(piece) :] = self.piece[size, len(piece) - 1]
            self.start[size, : len(piece)] = start
        high = float(self.times[-1])
        knot = np.minimum(self.start, high)
        if self.continuous:
            knot = np.append(knot, np.full((len(knot), 1), high), axis=1)
        self.knot = knot.T
        self.value = self._values_at(self.knot)

    def _fastest(self, pool: Ints) -> tuple[Ints, Floats]:
        """Return the fastest splits of the pool, each with the a from which it is the fastest. Of
        equal splits the first is chosen."""
        if not len(pool):
            return pool, np.zeros(0)
        times = self.times[: -1 if self.continuous else None, None]
        value = self.splits.latency(times, pool)
        nearly = value <= value.min(axis=1, keepdims=True) * (1 + PROGRESS)
        found = nearly.argmax(axis=1)
        if not self.continuous:
            return pool[found], self.times
        swept, starts = self._swept(pool, int(found[-1]))
        return np.append(pool[found[:-1]], swept), np.append(self._separate, starts)

    def _swept(self, pool: Ints, now: int) -> tuple[Ints, Floats]:
        """Do the work of ``_fastest`` for a range; ``now`` is the fastest at its start."""
        count, total = self.splits.row[pool] + 1, self.splits.total[pool]
        slowest, high = self.splits.slowest[pool], float(self.times[-1])
        found, starts = [now], [float(self.times[-2])]
        slope, bend = 1 / count, count * slowest
        early = total + (count - 1) * slowest  # + slope·a before the bend; total + a after it
        flat = np.where(slope < 1, 1 - slope, np.inf)
        while True:
            start = starts[-1]
            value = np.maximum(early + slope * start, total + start)
            pace = np.where(start < bend, slope, 1.0)
            flatter = (value <= value[now] * (1 + PROGRESS)) & (pace < pace[now])
            if flatter.any():  # equally fast at ``start``, and faster after it
                now = found[-1] = int(np.where(flatter, pace, np.inf).argmin())
            first = np.full(len(pool), np.inf)
            np.divide(early - early[now], slope[now] - slope, out=first, where=slope < slope[now])
            second = (early - total[now]) / flat
            meets = np.where(first <= bend[now], first, np.maximum(second, bend[now]))
            # A split that meets the current one later is faster after that, up to its own bend.
            meets[(meets <= start) | (meets >= bend) | (slope == 1)] = np.inf
            meets[now] = np.inf
            following = int(meets.argmin())
            if not meets[following] < high:
                break
            starts.append(float(meets[following]))
            found.append(following)
            now = following
        return pool[found], np.array(starts)
