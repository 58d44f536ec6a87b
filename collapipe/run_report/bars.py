"""Stacked bars over one axis; a round's Gantt chart is one, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from collapipe.run_report.drawing import (
    BOTTOM,
    LETTER,
    RIGHT,
    WIDE,
    WIDTH,
    colour,
    figure,
    fitting,
    floor_axis,
    key,
    legend,
    picture,
    text_at,
)
from collapipe.run_report.markup import Markup, join, tag
from collapipe.run_report.scale import Scale, scale

_ROW = 26.0


@dataclass(frozen=True, slots=True)
class Part:
    """Of a bar; ``style`` gives it a colour and, from 1 on, stripes."""

    name: str
    style: int
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts one behind the other, from 0; ``told`` stands behind the last."""

    name: str
    parts: tuple[Part, ...]
    told: str
    begin: float = 0.0


def bars(title: str, across: str, rows: Sequence[Bar], *, wide: bool = False) -> Markup:
    """A row a bar, all of them over one axis."""
    width, told = (WIDE if wide else WIDTH), 7.0 * max((len(row.told) for row in rows), default=0)
    left = min(0.4 * width, 14 + LETTER * max((len(row.name) for row in rows), default=0))
    floor = 8 + _ROW * len(rows)
    ends = [row.begin + sum(part.value for part in row.parts) for row in rows]
    horizontal = scale([0.0, *ends], left, width - RIGHT - told, count=8 if wide else 4)
    drawn = [_bar(row, 8 + _ROW * n, horizontal) for n, row in enumerate(rows)]
    drawing = picture(title, width, floor + BOTTOM, *drawn, floor_axis(horizontal, floor, across))
    named = {part.name: part for row in rows for part in row.parts if part.value > 0}
    samples = [
        (name, key(_block(part.style, 2, 1, 24, 10))) for name, part in named.items() if name
    ]
    return figure(title, drawing, legend(samples) if samples else None, wide=wide)


def _bar(row: Bar, top: float, horizontal: Scale) -> Markup:
    drawn, begin = [], row.begin
    for part in row.parts:
        x, end = horizontal.at(begin), horizontal.at(begin + part.value)
        drawn.append(_block(part.style, x, top + 4, end - x, _ROW - 8))
        begin += part.value
    shown = fitting(row.name, horizontal.begin - 8)
    name = text_at(horizontal.begin - 8, top + _ROW / 2 + 4, shown, "end")
    behind = text_at(horizontal.at(begin) + 6, top + _ROW / 2 + 4, row.told, "start")
    return join(name, *drawn, behind)


def _block(style: int, x: float, y: float, width: float, height: float) -> Markup:
    """A box in a style's colour; every other one has stripes across."""
    box = tag(
        "rect",
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        width=f"{width:.1f}",
        height=f"{height:.1f}",
        class_=f"fill {colour(style)}",
    )
    if style % 2 == 0:
        return box
    starts = range(4, int(width), 6)
    stripes = "".join(f"M{x + start:.1f} {y:.1f}v{height:.1f}" for start in starts)
    return join(box, tag("path", d=stripes, class_="stripe") if stripes else None)
