"""What is configured: overrides or a saved file become typed settings, checked once."""

from collapipe.config.loading import load, load_overrides, load_saved
from collapipe.config.own import own_overrides
from collapipe.config.settings import Settings

__all__ = ["Settings", "load", "load_overrides", "load_saved", "own_overrides"]
