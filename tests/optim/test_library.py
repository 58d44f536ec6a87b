"""``optim`` as a library: its page's example runs where torch and Flower cannot be imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import optim

ROOT = Path(__file__).parents[2]
WITHOUT = "import sys\nsys.modules |= dict.fromkeys(('torch', 'flwr', 'hydra', 'datasets'))\n"


def run(source: str) -> str:
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_example_runs_without_torch_and_flower_and_prints_what_the_page_says() -> None:
    page = (ROOT / "docs/how-to/planner-library.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "\n".join(f"    {line}" for line in run(WITHOUT + source).splitlines()) in page


def test_importing_it_loads_nothing_until_a_name_is_used() -> None:
    loaded = run("import sys, optim; print(sorted(sys.modules))")
    assert "'numpy'" not in loaded
    assert "'scipy'" not in loaded


@pytest.mark.parametrize("name", optim.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(optim, name).__name__ == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'nosuch'"):
        optim.nosuch  # noqa: B018
