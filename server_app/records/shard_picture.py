"""Draw the rows and labels of each unit's shard."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import PercentFormatter

from collapipe.process.drawing import own_look

_WIDTH_IN, _ROW_IN, _MARGIN_IN = 7.0, 0.22, 0.8
_MOST_UNITS, _MOST_LABELS, _MOST_LETTERS = 100, 15, 24
_BAR, _PLAIN, _OTHERS = 0.76, "#3b6ea5", "#dcdcdc"


@own_look()
def draw(
    units: Sequence[str],
    sizes: Sequence[int],
    counts: Sequence[Mapping[str, int]],
    labels: Sequence[str],
    file: Path,
) -> None:
    """Write a PNG of the shards of ``units``, at most of the first ``_MOST_UNITS``.

    ``counts`` has the number of rows of each label for each unit; ``labels`` are all labels in the
    order of their ids. Without labels, a bar's length is the shard's number of rows.
    """
    drawn = sizes[:_MOST_UNITS]
    height = _ROW_IN * max(len(drawn), min(len(labels), _MOST_LABELS) + 1) + _MARGIN_IN
    figure = Figure((_WIDTH_IN, height), layout="constrained")
    axes = figure.subplots()
    letters = get_font(findfont(FontProperties())).get_charmap()
    if labels:
        _draw_shares(axes, counts[:_MOST_UNITS], labels, letters)
    else:
        axes.barh(range(len(drawn)), drawn, _BAR, color=_PLAIN)
        axes.margins(x=0.1)  # space for the numbers
        axes.set_xlabel("rows", fontsize=8)
    for unit, size in enumerate(drawn):
        end = (1 if labels else size, unit)
        text = axes.annotate(
            f"{size:,}", end, (4, 0), textcoords="offset points", va="center", fontsize=7
        )
        text.set_in_layout(False)  # else many units take seconds
    names = [_drawn(name, str(n), letters) for n, name in enumerate(units[:_MOST_UNITS])]
    axes.set_yticks(range(len(drawn)), names, fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    few = len(drawn) < len(sizes)
    name = f"the first {len(drawn)} of {len(sizes)} units" if few else "unit"
    axes.set_ylabel(name, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    figure.savefig(file, format="png", dpi=160)


def _draw_shares(
    axes: Axes, counts: Sequence[Mapping[str, int]], labels: Sequence[str], letters: Container[int]
) -> None:
    """Draw a bar for each of the most frequent labels, by id, and one for the others."""
    total = {name: sum(count.get(name, 0) for count in counts) for name in labels}
    kept = set(sorted(labels, key=lambda name: -total[name])[:_MOST_LABELS])
    shown = [name for name in labels if name in kept]
    palette = color_sequences["tab10" if len(shown) <= 10 else "tab20"]
    rows = np.array([[count.get(name, 0) for name in shown] for count in counts], dtype=float)
    shares = rows / np.maximum([[sum(count.values())] for count in counts], 1)
    others = 1 - shares.sum(axis=1, keepdims=True)
    names = [_drawn(name, f"label {labels.index(name)}", letters) for name in shown]
    colours = [*palette[: len(shown)], _OTHERS]
    if len(labels) > len(shown):
        names, shares = [*names, "all others"], np.hstack([shares, others])
    starts = shares.cumsum(axis=1) - shares
    bars = [
        axes.barh(range(len(counts)), share, _BAR, start, color=colour)
        for share, start, colour in zip(shares.T, starts.T, colours, strict=False)
    ]
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("share of each label (at the bar: rows)", fontsize=8)
    axes.legend(bars, names, loc="upper left", bbox_to_anchor=(1.1, 1), fontsize=8, frameon=False)


def _drawn(name: str, fallback: str, letters: Container[int]) -> str:
    """Return a name, or ``fallback`` if the font lacks a letter of it. $ is escaped, because
    Matplotlib reads it as mathematics."""
    if not all(ord(letter) in letters for letter in name):
        return fallback
    shown = name if len(name) <= _MOST_LETTERS else f"{name[: _MOST_LETTERS - 1]}…"
    return shown.replace("$", r"\$")
