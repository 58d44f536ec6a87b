"""Charts of lines, bands and points, and of rows of boxes: stacked bars, Gantt charts, cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

from collapipe.run_report import drawing
from collapipe.run_report.drawing import Scale, scale
from collapipe.run_report.html import Markup, join, tag

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
_TOP, _ROW, _BOX = 8.0, 21.0, 15.0
_NARROW = 6.0  # width of a cell without room for a gap
Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """Points, joined by a line in their order or separate.

    ``band`` has the range of values at each place: ``(x, low, high)``.
    """

    name: str
    style: int
    points: Sequence[Point]
    joined: bool = True
    band: Sequence[tuple[float, float, float]] = ()


def lines(
    title: str, across: str, up: str, series: Sequence[Series], *, zero: bool = False
) -> Markup:
    """Return a chart of values ``up`` over values ``across``; with ``zero`` it starts at 0."""
    shown = [each for each in series if each.points]
    xs = [x for each in shown for x, _ in each.points]
    ys = [y for each in shown for _, y in each.points] + ([0.0] if zero else [])
    ys += [end for each in shown for _, *ends in each.band for end in ends]
    horizontal = scale(xs, _LEFT, drawing.WIDTH - drawing.RIGHT, whole=across == "round")
    vertical = scale(ys, _HEIGHT - drawing.BOTTOM, drawing.TOP, round_out=True)
    left, right, floor = horizontal.begin, horizontal.end, vertical.begin
    grid = "".join(f"M{left:g} {vertical.at(tick):.1f}H{right:g}" for tick in vertical.ticks)
    names = [
        drawing.text_at(left - 6, vertical.at(tick) + 4, name, "end")
        for tick, name in zip(vertical.ticks, vertical.names(), strict=True)
    ]
    drawn = [
        tag("path", d=grid, class_="grid"),
        *names,
        drawing.text_at(2, 13, drawing.fitting(up, drawing.WIDTH), "start"),
        drawing.floor_axis(horizontal, floor, across),
        *(_band(each, horizontal, vertical) for each in shown if each.band),
        *(_curve(each, horizontal, vertical) for each in shown),
    ]
    told = len(shown) > 1 or any(each.band for each in shown)
    samples = [(s.name, sample(s.style, s.joined, bool(s.band))) for s in shown if told]
    return drawing.figure(title, (drawing.WIDTH, _HEIGHT), drawn, samples)


def _thinned(values: Sequence[T]) -> list[T]:
    """Return at most ``_MOST_POINTS`` evenly spaced values, and the last one."""
    step = -(-len(values) // _MOST_POINTS)
    return [*values[:-1:step], values[-1]]


def _band(series: Series, horizontal: Scale, vertical: Scale) -> Markup:
    ends = _thinned(series.band)
    edge = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
    path = "L".join(_places(edge, horizontal, vertical))
    return tag("path", d=f"M{path}z", class_=f"band {drawing.colour(series.style)}")


def _curve(series: Series, horizontal: Scale, vertical: Scale) -> Markup:
    if not series.joined:
        return _marks(series.style, _places(series.points, horizontal, vertical), "points")
    places = _places(_thinned(series.points), horizontal, vertical)
    every = -(-len(places) // _MOST_MARKS)
    offset = (series.style * 3) % every  # so that marks of lines do not coincide
    line = _line(series.style, "M" + "L".join(places))
    return join(line, _marks(series.style, places[offset::every]))


def _places(points: Sequence[Point], horizontal: Scale, vertical: Scale) -> list[str]:
    return [f"{horizontal.at(x):.1f} {vertical.at(y):.1f}" for x, y in points]


def _line(style: int, path: str) -> Markup:
    dash = _DASHES[(style + style // drawing.COLOURS) % len(_DASHES)] or None
    return tag("path", d=path, class_=f"line {drawing.colour(style)}", stroke_dasharray=dash)


def _marks(style: int, places: Sequence[str], kind: str = "marks") -> Markup:
    mark = _MARKS[(style + style // drawing.COLOURS) % len(_MARKS)]
    path = "".join(f"M{place}{mark}" for place in places)
    return tag("path", d=path, class_=f"{kind} {drawing.colour(style)}")


def sample(style: int, joined: bool = True, band: bool = False) -> Markup:
    """Return a legend's sample of a line, with or without a band, or of separate points."""
    ground = (
        tag("path", d="M1 0H27v12H1z", class_=f"band {drawing.colour(style)}") if band else None
    )
    line = _line(style, "M1 6H27") if joined else None
    return drawing.key(ground, line, _marks(style, ["14 6"], "marks" if line else "points"))


@dataclass(frozen=True, slots=True)
class Kind:
    """Appearance of boxes: name in the legend (empty: no entry), CSS classes, share of a row's
    height."""

    name: str
    style: str
    top: float = 0.0
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """Boxes between positions on the axis, followed by the text ``told``."""

    name: str
    boxes: Sequence[tuple[Kind, Point]]
    told: str = ""


def stacked(name: str, parts: Iterable[tuple[Kind, float]], told: str) -> Row:
    """Return a stacked bar of parts, starting at 0."""
    known = [*parts]
    ends = accumulate((length for _, length in known), initial=0.0)
    boxes = [(kind, span) for (kind, _), span in zip(known, pairwise(ends), strict=True)]
    return Row(name, boxes, told)


def rows(title: str, across: str, content: Sequence[Row], *, wide: bool = False) -> Markup:
    """Return a chart of rows over an axis that starts at 0."""
    width = drawing.WIDE if wide else drawing.WIDTH
    ends = [max((end for _, (_, end) in row.boxes), default=0.0) for row in content]
    axis = scale([0.0, *ends], *_edges(content, width), count=8 if wide else 4)
    return _chart(title, across, content, axis, [axis.at(end) for end in ends], width)


def cells(title: str, content: Sequence[Row], rounds: Sequence[int]) -> Markup:
    """Return a chart of rows over an axis of rounds; a box fills the place of its round."""
    left, right = _edges(content, drawing.WIDE)
    first, last = float(rounds[0]), float(rounds[-1])
    ticks = scale([first, last], 0, 1, count=10, whole=True).ticks if last > first else (first,)
    axis = Scale(first - 0.5, last + 0.5, left, right, ticks)
    shown = [replace(row, boxes=_placed(row.boxes, axis)) for row in content]
    path = "".join(
        f"M{left:g} {_TOP + 3 + _ROW * n:g}H{right:.1f}v{_BOX:g}H{left:g}z"
        for n in range(len(shown))
    )
    ground = [tag("path", d=path, class_="ground")]
    return _chart(title, "round", shown, axis, [right] * len(shown), drawing.WIDE, ground)


def _placed(boxes: Sequence[tuple[Kind, Point]], axis: Scale) -> list[tuple[Kind, Point]]:
    """Centre each box on its round, with a gap after it; narrow boxes join the previous one."""
    width = axis.at(1.0) - axis.at(0.0)
    if width > _NARROW:
        return [(kind, (first - 0.5, last + 0.5 - 1 / width)) for kind, (first, last) in boxes]
    found: list[tuple[Kind, Point]] = []
    for kind, (first, last) in boxes:
        if found and found[-1][0] == kind and found[-1][1][1] == first - 0.5:
            found[-1] = (kind, (found[-1][1][0], last + 0.5))
        else:
            found.append((kind, (first - 0.5, last + 0.5)))
    return found


def _edges(content: Sequence[Row], width: float) -> Point:
    """Return start and end of the axis, with room for names on the left and ``told`` at right."""
    name = max((len(row.name) for row in content), default=0)
    told = max((len(row.told) for row in content), default=0)
    return min(0.4 * width, 14 + drawing.LETTER * name), width - drawing.RIGHT - 7.0 * told


def _chart(
    title: str,
    across: str,
    content: Sequence[Row],
    axis: Scale,
    behind: Sequence[float],
    width: float,
    ground: Sequence[Markup] = (),
) -> Markup:
    """Return a chart of rows; ``behind`` has the position of each row's ``told``."""
    floor, begin = _TOP + _ROW * len(content), axis.begin - 8
    paths: dict[Kind, str] = {}
    texts = []
    for number, (row, end) in enumerate(zip(content, behind, strict=True)):
        middle = _ROW * (number + 1)
        texts.append(drawing.text_at(begin, middle, drawing.fitting(row.name, begin), "end"))
        if row.told:
            texts.append(drawing.text_at(end + 6, middle, row.told, "start"))
        for kind, (first, last) in row.boxes:
            if last > first:
                top, tall = _TOP + 3 + _ROW * number + _BOX * kind.top, _BOX * kind.height
                paths[kind] = paths.get(kind, "") + (
                    f"M{axis.at(first):.1f} {top:.1f}H{axis.at(last):.1f}v{tall:.1f}"
                    f"H{axis.at(first):.1f}z"
                )
    drawn = [
        *ground,
        *texts,
        *(tag("path", d=path, class_=kind.style) for kind, path in paths.items()),
        drawing.floor_axis(axis, floor, across),
    ]
    samples = [
        (kind.name, drawing.key(tag("path", d=path, class_=kind.style)))
        for kind in paths
        if kind.name
        for path in [f"M2 {12 * kind.top:g}h24v{12 * kind.height:g}h-24z"]
    ]
    return drawing.figure(title, (width, floor + drawing.BOTTOM), drawn, samples)
