"""Runs can be submitted from a checkout and from an installed package."""

import io
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from collapipe.flower.commands import app_folder

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by Flower's builder


def test_an_installed_package_builds_the_same_app_as_a_checkout(tmp_path: Path) -> None:
    """The app has all files of our packages that Flower bundles, and no file of other packages."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = wheel["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, tmp_path / package)
    for file, place in wheel["force-include"].items():
        shutil.copy(ROOT / file, tmp_path / place)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "package.py").touch()
    with app_folder(tmp_path) as folder:
        installed = files(build_fab_from_disk(folder))
    with app_folder() as folder:
        assert not folder.joinpath("collapipe", "pyproject.toml").exists()
        assert installed == files(build_fab_from_disk(folder))
    ignored = shutil.ignore_patterns(".*", "build")  # Flower would read all these files
    checkout = files(build_fab_from_disk(shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)))
    ours = {name for name in checkout if name.split("/")[0] in wheel["packages"]}
    assert installed == ours | {"pyproject.toml", "LICENSE"}


def files(fab: bytes) -> set[str]:
    """The names of the files in an app's bundle, except the list that Flower adds."""
    with zipfile.ZipFile(io.BytesIO(fab)) as bundle:
        return {name for name in bundle.namelist() if not name.startswith(".")}
