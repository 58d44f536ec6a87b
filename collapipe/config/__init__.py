"""Configuration: convert overrides or a saved file to typed settings, and check them once."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe.config.loading import (
        complete,
        load,
        load_overrides,
        load_saved,
        load_text,
        outline,
        received,
    )
    from collapipe.config.own import own_overrides
    from collapipe.config.settings import Settings

__all__ = [
    "Settings",
    "complete",
    "load",
    "load_overrides",
    "load_saved",
    "load_text",
    "outline",
    "own_overrides",
    "received",
]
_ELSEWHERE = {"own_overrides": "own", "Settings": "settings"}  # the others are in loading


def __getattr__(name: str) -> Any:
    """Import Hydra, which takes a second, only for whoever composes a configuration."""
    if name in __all__:
        return resolve_name(f"collapipe.config.{_ELSEWHERE.get(name, 'loading')}:{name}")
    raise AttributeError(f"module 'collapipe.config' has no attribute {name!r}")
