"""Make Python find CollaPipe's other top-level packages before modules of the same names, and tell
its errors from those of a user's modules.

A user's folder may have modules named ``optim`` or ``pipeline``: a ``pipeline.py`` next to a
script, or a path in PYTHONPATH, would replace CollaPipe's package.
"""

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from collapipe.errors import ConfigError, one_line

NAMES = ("optim", "pipeline", "client_app", "server_app")
_ROOT = Path(__file__).resolve().parents[1]
_HOOKS = "__torch_function__", "__torch_dispatch__"


class _OwnPackages(MetaPathFinder):
    """Finds them at their first import: the server's thread may import one while a unit's thread
    imports another, and importing all of them at once would block both."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(_ROOT)]) if fullname in NAMES else None


def find_own_packages_first() -> None:
    """Import these packages from the folder that contains ``collapipe`` from now on.

    Raises ``ConfigError`` if another module of one of these names is already imported.
    """
    for name in NAMES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(_ROOT / name):
            raise ConfigError(
                f"{file}: the module {name} has the name of a package of CollaPipe; rename it"
            )
    if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackages())


def error_of_plugin(error: Exception) -> str | None:
    """Return an error with the file and line of a user's own class that raised it, perhaps in a
    library that it called; None if our code raised it."""
    place = place_in_plugin(error)
    return place and f"{type(error).__name__}: {one_line(error)} ({place})"


def place_in_plugin(error: Exception) -> str | None:
    """Return the file and line that ``error_of_plugin`` names, without the message, which may have
    values of rows."""
    own, paths = [_ROOT / name for name in ("collapipe", *NAMES)], sysconfig.get_paths()
    libraries = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Python has frozen files, and torch calls our hooks for operations of the user's.
        if not Path(frame.filename).is_absolute() or frame.name in _HOOKS:
            continue
        file = Path(frame.filename).resolve()
        if any(map(file.is_relative_to, own)):
            return None
        # Path.is_file raises an error in a folder that cannot be read.
        if os.access(file, os.F_OK) and not any(map(file.is_relative_to, libraries)):
            return f"{file.name}, line {frame.lineno}"
    return None
