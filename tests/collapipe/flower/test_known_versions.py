"""CollaPipe refuses Flower versions that are not in ``KNOWN``."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from collapipe.errors import ConfigError
from collapipe.flower import KNOWN, check_version

ROOT = Path(__file__).parents[3]


def test_pyproject_requires_the_known_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [Requirement(each) for extra in extras for each in extra]
    flower = [each.specifier for each in required if each.name == "flwr"]
    assert len(flower) == 2
    for minor in range(60):
        assert {f"1.{minor}.0" in each for each in flower} == {f"1.{minor}" in KNOWN}


def test_an_unknown_version_is_refused() -> None:
    check_version(version("flwr"))
    check_version("1.42.3")
    for installed in ("1.4", "1.40.9", "1.43.0", "2.0.0", "1.421.0"):
        with pytest.raises(ConfigError, match=f"flwr {installed} .*pip install 'flwr"):
            check_version(installed)
