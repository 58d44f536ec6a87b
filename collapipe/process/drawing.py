"""Draw pictures in one style, independent of a user's Matplotlib configuration, and save them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from collapipe.errors import printable
from collapipe.process.files import PUBLIC, replace


@contextmanager
def own_look(settings: Mapping[str, Any] = {}) -> Iterator[None]:
    """Draw with Matplotlib's defaults and these ``settings`` while the context is open."""
    with style.context(["default", dict(settings)]):
        yield


def save_plot(figure: Figure, file: Path) -> None:
    """Write a picture as SVG or PNG, depending on the file's suffix. Raises ``ConfigError`` if the
    file cannot be written; an existing one is then unchanged."""
    kind, picture = file.suffix.lower().removeprefix("."), BytesIO()
    replaced = file.exists()
    undated = {"Date": None} if kind == "svg" else None  # so that equal pictures are equal files
    figure.savefig(picture, format=kind, dpi=160, metadata=undated)
    replace(file, picture.getvalue(), PUBLIC)
    if replaced:
        print(printable(f"note: {file} was replaced"), file=sys.stderr)
