"""Runs and the pages of their reports."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import make_run
from report_page import Page

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(command: Command, tmp_path: Path) -> Callable[..., Page]:
    """The page that ``collapipe report ARGUMENTS`` writes."""

    def write(*arguments: object) -> Page:
        status, out, err = command("report", *arguments)
        assert (status, err) == (0, "")
        return Page(Path(out.strip()).read_text())

    return write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two strategies by three seeds; the second one's delays are 10, 12 and 14 % longer."""
    monkeypatch.chdir(tmp_path)
    made = [make_run(Path(f"d{seed}"), seed=seed) for seed in range(3)]
    for seed in range(3):
        slowness = 1.1 + 0.02 * seed
        random = {"strategy": "optim.baselines.Random", "seed": seed, "slowness": slowness}
        made.append(make_run(Path(f"r{seed}"), **random))
    return made
