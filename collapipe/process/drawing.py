"""Draw pictures in one style, independent of a user's Matplotlib configuration."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from matplotlib import style


@contextmanager
def own_look(settings: Mapping[str, Any] = {}) -> Iterator[None]:
    """Draw with Matplotlib's defaults and these ``settings`` while the context is open."""
    with style.context(["default", dict(settings)]):
        yield
