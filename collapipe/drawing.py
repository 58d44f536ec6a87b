"""The look of our pictures, whatever a user's own files of Matplotlib say."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from matplotlib import style


def own_look(settings: Mapping[str, Any] = {}) -> AbstractContextManager[None]:
    """Draw with Matplotlib's defaults and these ``settings`` while the context is open."""
    return style.context(["default", dict(settings)])
