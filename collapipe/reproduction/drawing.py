"""How all figures look: sizes, fonts, and marks that are apart in grey, too."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.runs.evidence import Interval

WIDTH_IN = 6.5
_ERRORS: Mapping[str, Any] = MappingProxyType(
    {"fmt": "none", "ecolor": "black", "capsize": 2.5, "linewidth": 1}
)
_STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        "lines.linewidth": 1.3,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "collapipe",  # and ids are not drawn by chance
    }
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A shade, a line style, a marker and a hatch for one thing."""

    shade: str
    line: str
    marker: str
    hatch: str

    def as_line(self) -> dict[str, Any]:
        """Arguments of ``plot``."""
        return {"color": self.shade, "linestyle": self.line, "marker": self.marker}

    def as_bar(self) -> dict[str, Any]:
        """Arguments of ``bar``."""
        return {"facecolor": self.shade, "edgecolor": "black", "hatch": self.hatch}


MARKS = (
    Mark("#08306b", "-", "o", ""),
    Mark("#f2a65a", "--", "s", "//"),
    Mark("#3d7fb5", "-.", "^", ".."),
    Mark("#7a1f1f", ":", "D", "xx"),
    Mark("#9fc5a0", "-", "v", "\\\\"),
    Mark("#6b6b6b", "--", "P", "--"),
    Mark("#d9d9d9", "-.", "X", "++"),
    Mark("#b07cc6", ":", "*", "||"),
    Mark("#f2d06b", "-", "<", "oo"),
)


def style() -> AbstractContextManager[None]:
    """Matplotlib's settings while a figure is drawn and saved."""
    settings: Any = dict(_STYLE)
    return rc_context(settings)


def panels(
    height_in: float, columns: int, rows: int = 1, **layout: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width with panels side by side, row after row."""
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **layout)
    return figure, list(axes.flat)


def legend_below(figure: Figure, axes: Sequence[Axes], columns: int) -> None:
    """One legend of all that these panels label."""
    labelled = [each.get_legend_handles_labels() for each in axes]
    figure.legend(
        [handle for handles, _ in labelled for handle in handles],
        [label for _, labels in labelled for label in labels],
        loc="outside lower center",
        ncols=columns,
    )


def error_bars(axes: Axes, places: Sequence[float], intervals: Sequence[Interval]) -> None:
    """95 % intervals on upright bars."""
    axes.errorbar(
        places,
        [each.mean for each in intervals],
        yerr=_reach(intervals),
        **_ERRORS,
    )


def level_error_bars(axes: Axes, places: Sequence[float], intervals: Sequence[Interval]) -> None:
    """The same on level bars."""
    axes.errorbar(
        [each.mean for each in intervals],
        places,
        xerr=_reach(intervals),
        **_ERRORS,
    )


def _reach(intervals: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Below and above the means."""
    below = [each.mean - each.ends[0] for each in intervals]
    return below, [each.ends[1] - each.mean for each in intervals]
