"""Units by rounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from collapipe.run_report.drawing import (
    BOTTOM,
    RIGHT,
    WIDE,
    figure,
    floor_axis,
    key,
    legend,
    picture,
    text_at,
)
from collapipe.run_report.markup import Markup, join, tag
from collapipe.run_report.scale import Scale, scale

_ROW, _CELL, _LABEL, _TOP = 18.0, 16.0, 78.0, 8.0
_NARROW = 6.0  # a cell without room for a gap beside it


@dataclass(frozen=True, slots=True)
class Kind:
    """How a cell of a matrix looks: its colour, and which part of the cell's height it takes."""

    name: str
    style: str
    top: float = 0.0
    height: float = 1.0


def matrix(
    title: str,
    names: Sequence[str],
    columns: Sequence[int],
    cells: Mapping[Kind, Iterable[tuple[int, int]]],
    told: Sequence[str],
) -> Markup:
    """A row of each name, a column of each number; ``cells`` are (row, column's number).

    ``told`` stands behind the rows.
    """
    floor = _TOP + _ROW * len(names)
    right = WIDE - RIGHT - 7.0 * max(map(len, told), default=0)
    edges = Scale(columns[0] - 0.5, columns[-1] + 0.5, _LABEL, right, _ticks(columns))
    marks = [
        tag("path", d=_boxes(kind, where, edges), class_=f"cell {kind.style}")
        for kind, where in cells.items()
    ]
    rows = [
        _row(number, *texts, right) for number, texts in enumerate(zip(names, told, strict=True))
    ]
    drawing = picture(title, WIDE, floor + BOTTOM, *rows, *marks, floor_axis(edges, floor, "round"))
    samples = [(kind.name, key(_sample(kind))) for kind in cells]
    return figure(title, drawing, legend(samples), wide=True)


def _ticks(columns: Sequence[int]) -> tuple[float, ...]:
    first, last = float(columns[0]), float(columns[-1])
    return scale([first, last], 0, 1, count=10, whole=True).ticks if last > first else (first,)


def _row(number: int, name: str, told: str, right: float) -> Markup:
    """What lies beneath the cells, and what stands on both sides."""
    top = _TOP + _ROW * number
    ground = f"M{_LABEL:g} {top + 1:g}H{right:.1f}v{_CELL:g}H{_LABEL:g}z"
    return join(
        tag("path", d=ground, class_="ground"),
        text_at(_LABEL - 8, top + 13, name, "end"),
        text_at(right + 6, top + 13, told, "start"),
    )


def _boxes(kind: Kind, where: Iterable[tuple[int, int]], edges: Scale) -> str:
    """Neighbours of a row as one box where they are too narrow to be apart."""
    apart = edges.at(1.0) - edges.at(0.0) > _NARROW
    found = []
    for row, first, last in _stretches(where, apart):
        x, end = edges.at(first - 0.5), edges.at(last + 0.5) - apart
        top, tall = _TOP + 1 + _ROW * row + _CELL * kind.top, _CELL * kind.height
        found.append(f"M{x:.1f} {top:.1f}H{end:.1f}v{tall:.1f}H{x:.1f}z")
    return "".join(found)


def _stretches(where: Iterable[tuple[int, int]], apart: bool) -> list[tuple[int, int, int]]:
    """Row, first and last column of cells that are drawn as one."""
    found: list[tuple[int, int, int]] = []
    for row, column in sorted(where):
        if not apart and found and (row, column - 1) == (found[-1][0], found[-1][2]):
            found[-1] = (row, found[-1][1], column)
        else:
            found.append((row, column, column))
    return found


def _sample(kind: Kind) -> Markup:
    top, tall = 12 * kind.top, 12 * kind.height
    ground = tag("path", d="M8 0h12v12h-12z", class_="ground")
    return join(ground, tag("path", d=f"M8 {top:g}h12v{tall:g}h-12z", class_=f"cell {kind.style}"))
