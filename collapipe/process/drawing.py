"""Draw pictures in one style, independent of a user's Matplotlib configuration, and save them."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.errors import printable
from collapipe.process.files import PUBLIC, replace


@contextmanager
def own_look(settings: Mapping[str, Any] = {}) -> Iterator[None]:
    """Draw with Matplotlib's defaults and these ``settings`` while the context is open."""
    with style.context(["default", dict(settings)]):
        yield


def name_rows(axes: Axes, names: Sequence[str], title: str) -> None:
    """Name rows, of which the first is at the top, and leave out the frame around the chart."""
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def save_plot(figure: Figure, file: Path) -> None:
    """Write a picture as SVG or PNG, depending on the file's suffix. Raises ``ConfigError`` if the
    file cannot be written; an existing one is then unchanged."""
    kind, picture = file.suffix.lower().removeprefix("."), BytesIO()
    replaced = file.exists()
    undated = {"Date": None} if kind == "svg" else None  # so that equal pictures are equal files
    with warnings.catch_warnings(record=True) as caught:  # such as letters that the font lacks
        figure.savefig(picture, format=kind, dpi=160, metadata=undated)
    for each in caught:
        print(printable(f"note: {file}: {each.message}"), file=sys.stderr)
    replace(file, picture.getvalue(), PUBLIC)
    if replaced:
        print(printable(f"note: {file} was replaced"), file=sys.stderr)
