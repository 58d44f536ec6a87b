"""The style of all figures: one palette, legible on white and distinct in grey."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from collapipe.runs.evidence import Interval, over_seeds

Series = Mapping[str, tuple[Sequence[float], Sequence[Interval]]]
"""Places and values of each label."""
WIDTH_IN = 6.5
_TINT = 0.55  # share of white in a bar's fill
STYLE: Mapping[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "collapipe",  # ids are not random
}
"""Matplotlib's settings while a figure is drawn and saved."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A colour, a line style, a marker and a hatch for one item."""

    colour: str
    line: str
    marker: str
    hatch: str

    def as_bar(self) -> dict[str, Any]:
        """Return the arguments for matplotlib's ``bar``."""
        tint = tuple(_TINT + (1 - _TINT) * part for part in to_rgb(self.colour))
        return {"facecolor": tint, "edgecolor": self.colour, "hatch": self.hatch}


MARKS = (
    Mark("#08306b", "-", "o", ""),
    Mark("#c8641a", "--", "s", "//"),
    Mark("#14613a", "-.", "^", ".."),
    Mark("#4c97cf", "-", "D", "xx"),
    Mark("#7a1f1f", ":", "v", "\\\\"),
    Mark("#8a4fa8", "--", "P", "--"),
    Mark("#1a1a1a", "-.", "X", "++"),
)
"""Colours with a contrast of at least 3:1 on white, and lightnesses at least 6 (L*) apart."""


def panels(
    height_in: float, columns: int, rows: int = 1, **layout: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of the page's width with rows of panels."""
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **layout).flat)


def draw_lines(
    axes: Axes, series: Series, markevery: Any = None, nested: bool = False, bands: bool = True
) -> None:
    """Draw a line of means for each label, with ``bands`` also its 95 % interval.

    Markers are offset, and with ``nested`` wide lines are below narrow ones, so that lines remain
    visible if they coincide.
    """
    count = len(series)
    for place, (label, (x, intervals)) in enumerate(series.items()):
        mark, every = MARKS[place], max(len(x) // 5, 1)
        ends = np.transpose([each.ends for each in intervals])
        if bands:
            axes.fill_between(x, *ends, color=mark.colour, alpha=0.2, linewidth=0)
        axes.plot(
            x,
            [each.mean for each in intervals],
            color=mark.colour,
            linestyle=mark.line,
            marker=mark.marker,
            markevery=(place * every // count, every) if markevery is None else markevery,
            linewidth=1.3 + 0.8 * (count - 1 - place) * nested,
            label=label,
        )


def error_bars(
    axes: Axes,
    places: Iterable[float],
    intervals: Sequence[Interval],
    *,
    level: bool = False,
    **style: Any,
) -> None:
    """Draw 95 % intervals for vertical or horizontal bars; ``style`` adds a marker or label."""
    means = np.array([each.mean for each in intervals])
    reach = np.abs(np.transpose([each.ends for each in intervals]) - means)
    at = {"x": means, "y": places, "xerr": reach} if level else {"y": means, "yerr": reach}
    look = {"linestyle": "none", "color": "black", "capsize": 2.5, "elinewidth": 1}
    axes.errorbar(**{"x": list(places), **at, **look, **style})


def annotate(axes: Axes, text: str, at: tuple[float, float], above: float) -> None:
    """Draw a small text some points above a place."""
    axes.annotate(text, at, (0, above), textcoords="offset points", ha="center", fontsize=8)


def over_places(values: ArrayLike) -> list[Interval]:
    """Return an interval for each place of ``values`` [seeds, places]."""
    return [over_seeds(column) for column in np.transpose(values).tolist()]


def legend_below(axes: Axes, columns: int) -> None:
    """Draw a panel's legend below it."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)
