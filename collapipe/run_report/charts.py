"""Charts of lines, bands and points, and of rows of boxes: stacked bars, Gantt charts, cells.

Matplotlib draws with placeholder colours. They become variables of the page's style sheet, so that
charts follow dark mode and print. Series differ by colour, mark and dashes.
"""

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator

from collapipe.errors import printable
from collapipe.process.drawing import own_look
from collapipe.run_report.html import Markup, scrolling, tag

_WIDTH, _WIDE, _HEIGHT, _INCH = 420.0, 860.0, 250.0, 72.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 26.0, 26.0, 42.0  # right: half a label of 7 characters
_ROW, _BOX, _ROW_TOP, _LETTER = 21.0, 0.72, 8.0, 7.4  # a box's height is its share of a row
_MARKS, _LEGEND_MARKS, _DASHES = "os^DvPX>", "●■▲◆▼✚✖▶", ("-", "--", ":", "-.")
_ABBREVIATED, _LONGEST = 1e4, 1e13  # ticks in between are 20k, 3M …
COLOURS, QUIET = 8, "quiet"
_VARIABLES = ("text", *(f"c{number}" for number in range(COLOURS)), QUIET, "rule", "ground", "cell")
_PLACEHOLDERS = {name: f"#{number:06x}" for number, name in enumerate(_VARIABLES)}
_LOOK = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.autolimit_mode": "round_numbers",
    "axes.edgecolor": _PLACEHOLDERS[QUIET],
    "axes.formatter.useoffset": False,
    "grid.color": _PLACEHOLDERS["rule"],
    "lines.linewidth": 1.8,
    **dict.fromkeys(("axes.xmargin", "axes.ymargin"), 0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.left", "axes.spines.right"), False),
    **dict.fromkeys(("xtick.bottom", "ytick.left"), False),
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_CONTENT = re.compile(r"</defs>(.*?)(<defs>\s*<clipPath.*)?</svg>", re.DOTALL)
_TAG, _COLOUR = re.compile(r"<[^>]+>\s*"), re.compile("#0000([0-9a-f]{2})")
_NEEDLESS = re.compile(  # the style sheet sets fonts, and nothing is outside the axes
    r'(?<=<g) id="[^"]*"| (clip-path|transform)="[^"]*"|font[^;"]*(; |(?="))|(?<=\.\d)\d+|\n *'
)
_RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z")
_MOST_POINTS = 500
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

    def draw(axes: Axes) -> None:
        for each in shown:
            _curve(axes, each)
            x, y = each.points[0]
            axes.update_datalim([(0.0 if across == "round" else x, 0.0 if zero else y)])
        axes.grid(axis="y")
        _ticks(axes.yaxis, 5)
        if zero and axes.dataLim.y0 >= 0:  # also if all values are 0
            axes.set_ylim(bottom=0)

    svg = picture(title, (across, up), (_WIDTH, _HEIGHT), (_LEFT, _RIGHT, _TOP), draw)
    named = len(series) > 1 or any(each.band for each in shown)
    return _captioned(title, svg, [(each.name, key(each.style)) for each in shown if named])


def _curve(axes: Axes, series: Series) -> None:
    colour, mark = _PLACEHOLDERS[colour_of(series.style)], _mark(series.style)
    if series.band:
        xs, low, high = zip(*_thinned(series.band), strict=True)
        axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
    points = _thinned(series.points)
    every = len(points) // 8 + 1
    axes.plot(
        *zip(*points, strict=True),
        color=colour,
        linestyle=_DASHES[mark % len(_DASHES)] if series.joined else "",
        marker=_MARKS[mark],
        markerfacecolor=_PLACEHOLDERS["ground"] if series.joined else colour,
        # Each series has other marks, so that equal lines can be told apart.
        markevery=(3 * mark % every, every) if series.joined else None,
    )


def _thinned(values: Sequence[T]) -> list[T]:
    """Return at most ``_MOST_POINTS`` evenly spaced values, and the last one."""
    step = -(-len(values) // _MOST_POINTS)
    return [*values[:-1:step], values[-1]]


def _ticks(axis: Axis, count: int, *, whole: bool = False) -> None:
    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=whole, min_n_ticks=1))
    axis.axes.autoscale_view()
    if _ABBREVIATED <= max(map(abs, axis.get_view_interval())) < _LONGEST:
        axis.set_major_formatter(EngFormatter(sep=""))


def colour_of(style: int) -> str:
    """Return the name of a style's colour in the style sheet."""
    return f"c{style % COLOURS}"


def _mark(style: int) -> int:
    return (style + style // COLOURS) % len(_MARKS)


def key(style: int) -> Markup:
    """Return a legend's mark of a series, in its colour."""
    return tag("span", _LEGEND_MARKS[_mark(style)], class_=colour_of(style), aria_hidden="true")


def legend(entries: Iterable[tuple[object, Markup]], *, tall: bool = False) -> Markup | None:
    """Return a legend, with one entry per line if ``tall``; None without entries."""
    items = [tag("li", mark, " ", name) for name, mark in entries]
    return tag("ul", *items, class_="legend tall" if tall else "legend") if items else None


@dataclass(frozen=True, slots=True)
class Kind:
    """Appearance of boxes: name in the legend (empty: no entry), colour in the style sheet, share
    of a row's height, opacity."""

    name: str
    colour: str
    top: float = 0.0
    height: float = 1.0
    opacity: float = 1.0

    @property
    def key(self) -> Markup:
        """A legend's box of this kind."""
        mark, faint = "■" if self.height > 0.5 else "▬", f"opacity: {self.opacity:g}"
        return tag("span", mark, class_=self.colour, style=faint, aria_hidden="true")


@dataclass(frozen=True, slots=True)
class Row:
    """Boxes between positions on the axis, followed by the text ``caption``."""

    name: str
    boxes: Sequence[tuple[Kind, Point]]
    caption: str = ""


def stacked(name: str, parts: Iterable[tuple[Kind, float]], caption: str) -> Row:
    """Return a stacked bar of parts, starting at 0."""
    known = [*parts]
    ends = accumulate((length for _, length in known), initial=0.0)
    boxes = [(kind, span) for (kind, _), span in zip(known, pairwise(ends), strict=True)]
    return Row(name, boxes, caption)


def rows(title: str, across: str, content: Sequence[Row], *, wide: bool = False) -> Markup:
    """Return a chart of rows over an axis that starts at 0."""
    last = max((end for row in content for _, (_, end) in row.boxes), default=0.0)
    return _rows(title, across, content, (0.0, last or 1.0), _WIDE if wide else _WIDTH)


def cells(title: str, content: Sequence[Row], rounds: Sequence[int]) -> Markup:
    """Return a chart of rows over an axis of rounds; a box fills the place of its round."""
    span = rounds[0] - 0.5, rounds[-1] + 0.5
    shown = []
    for row in content:
        placed = [(kind, (first - 0.5, last + 0.4)) for kind, (first, last) in row.boxes]
        shown.append(Row(row.name, [(Kind("", "cell"), span), *placed], row.caption))
    return _rows(title, "round", shown, span, _WIDE)


def _rows(title: str, across: str, content: Sequence[Row], span: Point, width: float) -> Markup:
    name = max((len(row.name) for row in content), default=0)
    caption = max((len(row.caption) for row in content), default=0)
    left = max(_RIGHT, min(0.4 * width, 14 + _LETTER * name))
    right = min(0.5 * width, _RIGHT + _LETTER * caption)
    gap = 7 * (span[1] - span[0]) / (width - left - right)

    def draw(axes: Axes) -> None:
        corners = defaultdict[Kind, list[list[Point]]](list)
        for number, row in enumerate(content):
            end = max((end for _, (_, end) in row.boxes), default=0.0)
            name = _fitting(row.name, left)
            axes.text(span[0] - gap, number, name, ha="right", va="center")
            axes.text(end + gap, number, _fitting(row.caption, right), va="center")
            for kind, (first, last) in row.boxes:
                low = number + _BOX * (kind.top - 0.5)
                high = low + _BOX * kind.height
                corners[kind].append([(first, low), (last, low), (last, high), (first, high)])
        for kind, boxes in corners.items():
            path = Path.make_compound_path_from_polys(np.array(boxes))
            colour = _PLACEHOLDERS[kind.colour]
            axes.add_artist(PathPatch(path, facecolor=colour, alpha=kind.opacity, linewidth=0))
        axes.set(xlim=span, ylim=(max(len(content), 1) - 0.5, -0.5))
        axes.yaxis.set_visible(False)

    size = width, _ROW_TOP + _ROW * len(content) + _BOTTOM
    svg = picture(title, (across, ""), size, (left, right, _ROW_TOP), draw)
    kinds = dict.fromkeys(kind for row in content for kind, _ in row.boxes if kind.name)
    return _captioned(title, svg, [(kind.name, kind.key) for kind in kinds], wide=width > _WIDTH)


def _fitting(text: str, width: float) -> str:
    most = max(1, int(width / _LETTER))
    short = printable(text[: most + 1])
    return short if len(short) <= most else f"{short[: most - 1]}…"


def _captioned(
    title: str, svg: Markup, entries: Iterable[tuple[str, Markup]], *, wide: bool = False
) -> Markup:
    """Return a chart with title and legend; wide charts scroll."""
    whole = tag("figcaption", title), scrolling(svg, title) if wide else svg, legend(entries)
    return tag("figure", *whole, class_="wide" if wide else None)


def picture(
    title: str,
    labels: tuple[str, str],
    size: Point,
    margins: tuple[float, float, float],
    draw: Callable[[Axes], None],
) -> Markup:
    """Return an SVG element of this width and height. Screen readers read the title.

    ``labels`` name the horizontal and the vertical axis. ``draw`` fills the axes between
    the margins on the left, on the right, and at the top.
    """
    (across, up), (width, height), (left, right, top) = labels, size, margins
    wide, file = width - left - right, io.StringIO()
    # With this salt, identifiers of marks differ between charts but not between runs.
    with own_look(_LOOK | {"svg.hashsalt": ascii(title)}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        figure = Figure((width / _INCH, height / _INCH), facecolor="none")
        box = left / width, _BOTTOM / height, wide / width, 1 - (top + _BOTTOM) / height
        axes = figure.add_axes(box, facecolor="none")
        draw(axes)
        _ticks(axes.xaxis, round(wide / 55), whole=across == "round")
        middle = (left + wide / 2) / width, 10 / height
        figure.text(*middle, _fitting(across, wide + right), ha="center", va="center")
        figure.text(0, 1 - 10 / height, _fitting(up, width), va="center")
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
    content = _CONTENT.search(file.getvalue())
    assert content
    drawn = Markup(_TAG.sub(lambda found: _slim(found[0]), content[1]))
    return tag("svg", drawn, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=title)


def _slim(element: str) -> str:
    """Return a shorter tag with the same appearance, with the style sheet's colours."""
    short = _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", _NEEDLESS.sub("", element))
    return _COLOUR.sub(lambda found: f"var(--{_VARIABLES[int(found[1], 16)]})", short)
