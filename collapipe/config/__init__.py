"""Configuration: convert overrides or a saved file to typed settings, and check them once."""

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
