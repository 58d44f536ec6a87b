"""CollaPipe as a Flower app: a folder with a ``pyproject.toml``, as ``flwr run`` requires."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collapipe.own_packages import NAMES
from collapipe.process.folders import TemporaryFolder

_ROOT = Path(__file__).parents[2]
_FILES = "pyproject.toml", "LICENSE"


@contextmanager
def app_folder(root: Path = _ROOT) -> Iterator[Path]:
    """Yield a temporary copy of the packages with ``_FILES`` at its root.

    It is small: of a checkout Flower would pack pages and tests too, and search its ``.venv`` for
    several seconds. pip installs ``_FILES`` inside the package (``force-include`` in
    ``pyproject.toml``).
    """
    with TemporaryFolder("app") as folder:
        for package in ("collapipe", "conf", *NAMES):
            compiled = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / package, folder / package, ignore=compiled)
        for file in _FILES:
            (folder / "collapipe" / file).unlink(missing_ok=True)
            own = root / file
            shutil.copy(own if own.exists() else root / "collapipe" / file, folder / file)
        yield folder
