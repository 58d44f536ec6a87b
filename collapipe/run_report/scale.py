"""Axes: round numbers at even distances, and where a value lies."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0, 10.0)
_SHORT = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from, divided by, suffix
_LONG = 1e13  # from here on even billions are


@dataclass(frozen=True, slots=True)
class Scale:
    """Values ``low`` … ``high`` on the way from ``begin`` to ``end``, in the picture's units."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where the value lies."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def names(self) -> list[str]:
        """What stands beside the ticks, with as many digits as tell them apart."""
        largest = max(map(abs, self.ticks))
        _, factor, suffix = next((each for each in _SHORT if largest >= each[0]), (0.0, 1.0, ""))
        step = (self.ticks[1] - self.ticks[0]) / factor if len(self.ticks) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if digits > 4 or largest >= _LONG:
            return [f"{tick:.3g}" for tick in self.ticks]
        return [f"{tick / factor:,.{digits}f}{suffix if tick else ''}" for tick in self.ticks]


def scale(
    values: Iterable[float],
    begin: float,
    end: float,
    *,
    count: int = 5,
    whole: bool = False,
    round_out: bool = False,
) -> Scale:
    """An axis for the values, with about ``count`` ticks.

    Ticks are whole numbers where ``whole``; the axis begins and ends at ticks where ``round_out``.
    """
    known = list(values) or [0.0, 1.0]
    low, high = min(known), max(known)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = 0.5 * abs(low)
        low, high = (min(low, 0.0), max(high, 0.0)) if whole else (low - room, high + room)
        high = max(high, low + 1.0) if whole or not room else high
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in _STEPS if each * power >= raw * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    if round_out:
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, begin, end, tuple(n * step for n in range(first, last + 1)))
