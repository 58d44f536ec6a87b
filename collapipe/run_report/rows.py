"""Rows of boxes over one axis: stacked bars, Gantt charts, and units by rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from collapipe.run_report import drawing
from collapipe.run_report.html import Markup, join, tag
from collapipe.run_report.scale import Scale, scale

_TOP, _ROW, _BOX = 8.0, 21.0, 15.0
_NARROW = 6.0  # a cell without room for a gap beside it
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kind:
    """How boxes look: their name in the legend, none where it is empty, their classes, and which
    part of the row's height they take."""

    name: str
    style: str
    top: float = 0.0
    height: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """Boxes from a place on the axis to another; ``told`` stands behind them."""

    name: str
    boxes: Sequence[tuple[Kind, Span]]
    told: str = ""


def stacked(name: str, parts: Iterable[tuple[Kind, float]], told: str) -> Row:
    """A bar of parts, one behind the other from 0."""
    known = [*parts]
    ends = accumulate((length for _, length in known), initial=0.0)
    boxes = [(kind, span) for (kind, _), span in zip(known, pairwise(ends), strict=True)]
    return Row(name, boxes, told)


def rows(title: str, across: str, content: Sequence[Row], *, wide: bool = False) -> Markup:
    """Rows over an axis from 0."""
    width = drawing.WIDE if wide else drawing.WIDTH
    ends = [end for row in content for _, (_, end) in row.boxes]
    left, right = _edges(content, width)
    axis = scale([0.0, *ends], left, right, count=8 if wide else 4)
    behind = [axis.at(max((end for _, (_, end) in row.boxes), default=0.0)) for row in content]
    return _chart(title, across, content, axis, behind, width)


def cells(title: str, content: Sequence[Row], rounds: Sequence[int]) -> Markup:
    """Rows over an axis of rounds; a box fills the place of its round."""
    left, right = _edges(content, drawing.WIDE)
    first, last = float(rounds[0]), float(rounds[-1])
    ticks = scale([first, last], 0, 1, count=10, whole=True).ticks if last > first else (first,)
    axis = Scale(first - 0.5, last + 0.5, left, right, ticks)
    apart = axis.at(1.0) - axis.at(0.0) > _NARROW
    shown = [Row(row.name, _placed(row.boxes, axis, apart), row.told) for row in content]
    ground = "".join(
        f"M{left:g} {_TOP + 3 + _ROW * n:g}H{right:.1f}v{_BOX:g}H{left:g}z"
        for n in range(len(shown))
    )
    behind = [right] * len(shown)
    return _chart(
        title, "round", shown, axis, behind, drawing.WIDE, tag("path", d=ground, class_="ground")
    )


def _placed(
    boxes: Sequence[tuple[Kind, Span]], axis: Scale, apart: bool
) -> list[tuple[Kind, Span]]:
    """Each box around its round, with a gap behind it or joined to the one before."""
    gap = 1 / (axis.at(1.0) - axis.at(0.0)) if apart else 0.0
    found: list[tuple[Kind, Span]] = []
    for kind, (first, last) in boxes:
        if not apart and found and found[-1][0] == kind and found[-1][1][1] == first - 0.5:
            found[-1] = (kind, (found[-1][1][0], last + 0.5))
        else:
            found.append((kind, (first - 0.5, last + 0.5 - gap)))
    return found


def _edges(content: Sequence[Row], width: float) -> Span:
    """Where the axis begins and ends, with room for names on the left and ``told`` behind."""
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
    ground: Markup | None = None,
) -> Markup:
    floor = _TOP + _ROW * len(content)
    paths: dict[Kind, list[str]] = {}
    for number, row in enumerate(content):
        for kind, span in row.boxes:
            if span[1] > span[0]:
                paths.setdefault(kind, []).append(_box(kind, span, number, axis))
    texts = [
        join(
            drawing.text_at(axis.begin - 8, y, drawing.fitting(row.name, axis.begin - 8), "end"),
            drawing.text_at(end + 6, y, row.told, "start") if row.told else None,
        )
        for row, end, y in zip(content, behind, accumulate([_ROW] * len(content)), strict=True)
    ]
    drawn = [
        *([ground] if ground else []),
        *texts,
        *(tag("path", d="".join(boxes), class_=kind.style) for kind, boxes in paths.items()),
        drawing.floor_axis(axis, floor, across),
    ]
    samples = [(kind.name, _sample(kind)) for kind in paths if kind.name]
    return drawing.figure(title, (width, floor + drawing.BOTTOM), drawn, samples)


def _box(kind: Kind, span: Span, number: int, axis: Scale) -> str:
    begin, end = axis.at(span[0]), axis.at(span[1])
    top, tall = _TOP + 3 + _ROW * number + _BOX * kind.top, _BOX * kind.height
    return f"M{begin:.1f} {top:.1f}H{end:.1f}v{tall:.1f}H{begin:.1f}z"


def _sample(kind: Kind) -> Markup:
    path = f"M2 {12 * kind.top:g}h24v{12 * kind.height:g}h-24z"
    return drawing.key(tag("path", d=path, class_=kind.style))
