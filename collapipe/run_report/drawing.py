"""The parts of all charts: inline SVG, written without matplotlib.

So the page's style sheet can colour charts for dark, light and print, and charts scale with the
page and have a tenth of the size. Items differ both in colour and in form."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from collapipe.run_report.html import Markup, join, scrolling, tag

WIDTH, WIDE = 420.0, 860.0
RIGHT, TOP, BOTTOM = 20.0, 24.0, 40.0
LETTER = 7.4  # upper bound of the mean width of a letter
COLOURS = 8
_STEPS = (1.0, 2.0, 5.0, 10.0)
_SHORT = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from, divided by, suffix
_LONG = 1e13  # from here on even billions are


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values ``low`` … ``high`` to positions ``begin`` … ``end`` in the picture's units."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the position of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def names(self) -> list[str]:
        """Return the tick labels with enough digits to differ."""
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
    """Return an axis for the values, with about ``count`` ticks.

    With ``whole``, ticks are whole numbers. With ``round_out``, the axis starts and ends at ticks.
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


def figure(
    title: str,
    size: tuple[float, float],
    content: Iterable[Markup],
    legend_entries: Iterable[tuple[str, Markup]],
) -> Markup:
    """Return a chart with title and legend. Screen readers read the title; wide charts scroll."""
    width, height = size
    box = f"0 0 {width:g} {height:g}"
    drawn = tag("svg", *content, viewBox=box, role="img", aria_label=title)
    wide = width > WIDTH
    return tag(
        "figure",
        tag("figcaption", title),
        scrolling(drawn, title) if wide else drawn,
        legend(legend_entries),
        class_="wide" if wide else None,
    )


def legend(entries: Iterable[tuple[object, Markup]], *, tall: bool = False) -> Markup | None:
    """Return a legend, with one entry per line if ``tall``; None without entries."""
    items = [tag("li", sample, " ", name) for name, sample in entries]
    return tag("ul", *items, class_="legend tall" if tall else "legend") if items else None


def floor_axis(horizontal: Scale, floor: float, across: str) -> Markup:
    """Return the horizontal axis at the height ``floor``."""
    left, right = horizontal.begin, horizontal.end
    ticks = "".join(f"M{horizontal.at(tick):.1f} {floor:g}v4" for tick in horizontal.ticks)
    names = [
        text_at(horizontal.at(tick), floor + 17, name, "middle")
        for tick, name in zip(horizontal.ticks, horizontal.names(), strict=True)
    ]
    return join(
        tag("path", d=f"M{left:g} {floor:g}H{right:g}{ticks}", class_="axis"),
        *names,
        text_at((left + right) / 2, floor + 34, fitting(across, right - left), "middle"),
    )


def text_at(x: float, y: float, text: str, anchor: str) -> Markup:
    """Return a text whose ``anchor`` (``start``, ``middle`` or ``end``) is at x."""
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def fitting(text: str, width: float) -> str:
    """Shorten a text to a width."""
    most = max(1, int(width / LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def key(*content: Markup | None) -> Markup:
    """Return a legend's sample, 28 by 12."""
    return tag("svg", *content, viewBox="0 0 28 12", class_="key", aria_hidden="true")


def colour(style: int) -> str:
    """Return the CSS class of a style's colour."""
    return f"c{style % COLOURS}"
