"""Paths below the user's home, which a user of a container or a service may not have."""

from pathlib import Path

from collapipe.errors import ConfigError


def in_home(path: str) -> str:
    """The path, with a leading ``~/`` replaced by the user's home; other paths stay.

    Raises ``ConfigError`` where the home is needed and there is none.
    """
    if not path.startswith("~/"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: this user has no home folder; write the whole path, or set HOME"
        ) from error
