"""CollaPipe as a Flower app: a folder with a ``pyproject.toml``, as ``flwr run`` requires."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collapipe.own_packages import NAMES
from collapipe.temporary import TemporaryFolder

_ROOT = Path(__file__).parents[2]
_PROJECT = "pyproject.toml"
_FILES = _PROJECT, "LICENSE"


@contextmanager
def app_folder(root: Path = _ROOT) -> Iterator[Path]:
    """Yield the app's folder: the checkout, or a temporary copy of the installed packages.

    pip installs ``_FILES`` inside the package (``force-include`` in the checkout's
    ``pyproject.toml``); the copy has them at its root.
    """
    if (root / _PROJECT).exists():
        yield root
        return
    with TemporaryFolder("app") as folder:
        for package in ("collapipe", "conf", *NAMES):
            compiled = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / package, folder / package, ignore=compiled)
        for file in _FILES:
            (folder / "collapipe" / file).rename(folder / file)
        yield folder
