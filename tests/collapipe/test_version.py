"""The version of CollaPipe, also without an installed distribution."""

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


def test_the_version_equals_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ == project["version"]


def test_the_command_prints_the_version(command: Callable[..., tuple[int, str, str]]) -> None:
    assert command("--version") == command("version") == (0, f"{__version__}\n", "")


def test_the_activation_folder_is_the_same_without_installed_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower unpacks an app bundle without installing it."""
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
