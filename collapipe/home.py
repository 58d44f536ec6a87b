"""Expand paths in the user's home folder; users of containers and services may have none."""

from pathlib import Path

from collapipe.errors import ConfigError


def in_home(path: str) -> str:
    """Return the path with a leading ``~/`` replaced by the user's home folder.

    Raises ``ConfigError`` if the home folder is needed but unknown.
    """
    if not path.startswith("~/"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: this user has no home folder; write the whole path, or set HOME"
        ) from error
