"""Configuration: convert overrides or a saved file to typed settings, and check them once."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapipe.config.loading import (
        Outline,
        load,
        load_overrides,
        load_saved,
        outline,
        run_folder,
    )
    from collapipe.config.own import own_overrides
    from collapipe.config.settings import Settings

__all__ = [
    "Outline",
    "Settings",
    "load",
    "load_overrides",
    "load_saved",
    "outline",
    "own_overrides",
    "run_folder",
]
_ELSEWHERE = {"own_overrides": "own", "Settings": "settings"}  # the others are in loading


def __getattr__(name: str) -> Any:
    """Import Hydra, which takes a second, only for whoever composes a configuration."""
    if name in __all__:
        return resolve_name(f"collapipe.config.{_ELSEWHERE.get(name, 'loading')}:{name}")
    raise AttributeError(f"module 'collapipe.config' has no attribute {name!r}")
