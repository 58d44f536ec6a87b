"""CollaPipe knows its version wherever it stands: installed, in a checkout, in a Flower bundle."""

import importlib.metadata
import tomllib
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
import torch

from collapipe import __version__
from collapipe.models.stem import activation_folder

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ == project["version"]


def test_the_command_prints_it(command: Callable[..., tuple[int, str, str]]) -> None:
    assert command("--version") == command("version") == (0, f"{__version__}\n", "")


def test_activations_are_kept_where_nothing_of_ours_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bundle is unpacked and has no distribution's metadata."""
    from_name = Distribution.from_name

    def without_ours(name: str) -> Distribution:
        if name == "collapipe":
            raise PackageNotFoundError(name)
        return from_name(name)

    of_model = "0" * 64, "model", torch.device("cpu")
    with monkeypatch.context() as bundle:
        bundle.setattr(importlib.metadata.Distribution, "from_name", without_ours)
        folder = activation_folder(*of_model)
    assert folder == activation_folder(*of_model)
