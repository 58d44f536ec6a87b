"""CollaPipe as a Flower app, which ``flwr run`` takes as a folder with a ``pyproject.toml``."""

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
    """The checkout, or what pip has installed beside other packages in ``root``, in a folder of its
    own: there the ``_FILES`` are in the package, by ``force-include`` in the first."""
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
