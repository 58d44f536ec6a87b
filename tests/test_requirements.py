"""Files of requirements for machines that take only a part are parts of pyproject's."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements_files import ROOT, required


@pytest.mark.parametrize("file", ["requirements-device.txt", "requirements-unit.txt"])
def test_the_file_agrees_with_pyproject(file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {each.name: each for each in map(Requirement, project["dependencies"])}
    assert required(file)
    for each in required(file):
        assert known[each.name].specifier == each.specifier, each.name
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = {canonicalize_name(each.name) for each in required(file)}
    assert names <= {canonicalize_name(pin) for pin in pins}
