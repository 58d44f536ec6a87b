"""Lines, bands and points over two axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from collapipe.run_report import drawing
from collapipe.run_report.html import Markup, join, tag
from collapipe.run_report.scale import Scale, scale

_HEIGHT, _LEFT = 250.0, 50.0
_DASHES = ("", "7 3", "2 2", "8 3 2 3", "12 3", "4 2", "1 3", "6 2 1 2 1 2")
_MARKS = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "m-2.8-2.8h5.6v5.6h-5.6z",
    "m0-3.6l3.6 6.4h-7.2z",
    "m0-4l3.6 4l-3.6 4l-3.6-4z",
    "m0 3.6l3.6-6.4h-7.2z",
    "m-3.4 0h6.8m-3.4-3.4v6.8",
    "m-2.8-2.8l5.6 5.6m0-5.6l-5.6 5.6",
    "m-3.6 0l6.4-3.6v7.2z",
)
_MOST_MARKS, _MOST_POINTS = 8, 500
Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order in which a line joins them, or by themselves.

    ``band`` has the least and the most of what each point stands for: ``(x, low, high)``.
    """

    name: str
    style: int
    points: Sequence[Point]
    joined: bool = True
    band: Sequence[tuple[float, float, float]] = ()


def lines(
    title: str, across: str, up: str, series: Sequence[Series], *, zero: bool = False
) -> Markup:
    """A chart of values ``up`` against values ``across``; from 0 where ``zero``."""
    shown = [each for each in series if each.points]
    xs = [x for each in shown for x, _ in each.points]
    ys = [y for each in shown for _, y in each.points] + ([0.0] if zero else [])
    ys += [end for each in shown for _, *ends in each.band for end in ends]
    horizontal = scale(xs, _LEFT, drawing.WIDTH - drawing.RIGHT, whole=across == "round")
    vertical = scale(ys, _HEIGHT - drawing.BOTTOM, drawing.TOP, round_out=True)
    drawn = [
        _axes(horizontal, vertical, across, up),
        *(_band(each, horizontal, vertical) for each in shown if each.band),
        *(_curve(each, horizontal, vertical) for each in shown),
    ]
    told = len(shown) > 1 or any(each.band for each in shown)
    samples = [(s.name, sample(s.style, s.joined, bool(s.band))) for s in shown if told]
    return drawing.figure(title, (drawing.WIDTH, _HEIGHT), drawn, samples)


def _axes(horizontal: Scale, vertical: Scale, across: str, up: str) -> Markup:
    left, right, floor = horizontal.begin, horizontal.end, vertical.begin
    grid = "".join(f"M{left:g} {vertical.at(tick):.1f}H{right:g}" for tick in vertical.ticks)
    names = [
        drawing.text_at(left - 6, vertical.at(tick) + 4, name, "end")
        for tick, name in zip(vertical.ticks, vertical.names(), strict=True)
    ]
    return join(
        tag("path", d=grid, class_="grid"),
        *names,
        drawing.text_at(2, 13, drawing.fitting(up, drawing.WIDTH), "start"),
        drawing.floor_axis(horizontal, floor, across),
    )


def _thinned(values: Sequence[T]) -> list[T]:
    """At most ``_MOST_POINTS`` values at even distances, and the last one."""
    step = -(-len(values) // _MOST_POINTS)
    return [*values[:-1:step], values[-1]]


def _band(series: Series, horizontal: Scale, vertical: Scale) -> Markup:
    ends = _thinned(series.band)
    there = [f"{horizontal.at(x):.1f} {vertical.at(low):.1f}" for x, low, _ in ends]
    back = [f"{horizontal.at(x):.1f} {vertical.at(high):.1f}" for x, _, high in reversed(ends)]
    path = f"M{'L'.join((*there, *back))}z"
    return tag("path", d=path, class_=f"band {drawing.colour(series.style)}")


def _curve(series: Series, horizontal: Scale, vertical: Scale) -> Markup:
    points = _thinned(series.points) if series.joined else series.points
    places = [f"{horizontal.at(x):.1f} {vertical.at(y):.1f}" for x, y in points]
    if not series.joined:
        return _marks(series.style, places, "points")
    every = -(-len(places) // _MOST_MARKS)
    offset = (series.style * 3) % every  # so that marks of lines on one another can be told apart
    return join(
        _line(series.style, "M" + "L".join(places)), _marks(series.style, places[offset::every])
    )


def _line(style: int, path: str) -> Markup:
    dash = _DASHES[(style + style // drawing.COLOURS) % len(_DASHES)] or None
    return tag("path", d=path, class_=f"line {drawing.colour(style)}", stroke_dasharray=dash)


def _marks(style: int, places: Sequence[str], kind: str = "marks") -> Markup:
    mark = _MARKS[(style + style // drawing.COLOURS) % len(_MARKS)]
    path = "".join(f"M{place}{mark}" for place in places)
    return tag("path", d=path, class_=f"{kind} {drawing.colour(style)}")


def sample(style: int, joined: bool = True, band: bool = False) -> Markup:
    """What a legend shows of a line, with or without a band, or of points by themselves."""
    ground = (
        tag("path", d="M1 0H27v12H1z", class_=f"band {drawing.colour(style)}") if band else None
    )
    line = _line(style, "M1 6H27") if joined else None
    return drawing.key(ground, line, _marks(style, ["14 6"], "marks" if line else "points"))
