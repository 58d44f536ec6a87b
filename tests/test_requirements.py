"""Requirements in pyproject.toml are pinned, and missing libraries are named with their extra."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name
from requirements_files import ROOT, installed, required

from collapipe.process.extras import missing


def test_each_requirement_is_pinned_and_has_one_range() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    ranges = dict[str, set[str]]()
    for each in required("dev"):
        ranges.setdefault(canonicalize_name(each.name), set()).add(str(each.specifier))
    assert {*ranges} <= {canonicalize_name(pin) for pin in pins}
    assert [name for name, found in ranges.items() if len(found) > 1] == []


def test_each_package_of_the_wheel_is_marked_as_typed() -> None:
    """Otherwise type checkers of users take everything in it for Any."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = [ROOT / name for name in built["targets"]["wheel"]["packages"]]
    python = [each for each in packages if any(each.rglob("*.py"))]
    assert [each.name for each in python if not (each / "py.typed").is_file()] == []
    assert len(python) > 1


def test_a_missing_library_is_named_with_its_extra() -> None:
    assert missing("yaml.error") == "yaml is not installed; pip install 'collapipe[unit]'"
    assert missing("cvxpy") == "cvxpy is not installed; pip install 'collapipe[paper]'"
    assert missing("psutil") == "psutil is not installed; pip install 'collapipe'"


def test_a_library_that_collapipe_does_not_require_is_named_without_an_extra() -> None:
    """A user's plug-in may import any library."""
    assert "collapipe" not in missing("unheard_of.part")
    assert missing("unheard_of.part").startswith("unheard_of is not installed; ")


def test_a_command_names_the_extra_that_is_not_installed(tmp_path: Path) -> None:
    site = installed([], tmp_path / "site")
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{site}"}
    words = "plan", str(ROOT / "docs/examples/workshop.yaml")
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "collapipe", *words], env=own, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert re.fullmatch(
        r"error: \w+ is not installed; pip install 'collapipe\[\w+\]'\n", ended.stderr
    )
