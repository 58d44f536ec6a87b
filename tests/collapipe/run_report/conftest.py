"""Fixtures for runs and for the pages of their reports."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import make_run
from report_page import Page

from collapipe.run_report import charts
from collapipe.run_report.html import Markup, tag

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pages in a tenth of the time: charts have only titles, axis labels and legends."""

    def picture(title: str, labels: tuple[str, str], *_: object) -> Markup:
        texts = [tag("text", label) for label in labels]
        return tag("svg", *texts, role="img", aria_label=title)

    monkeypatch.setattr(charts, "picture", picture)


@pytest.fixture
def report(drawn_report: Callable[..., Page], undrawn: None) -> Callable[..., Page]:
    """``drawn_report`` without the drawings in charts."""
    return drawn_report


@pytest.fixture
def drawn_report(command: Command) -> Callable[..., Page]:
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
    """Two strategies with three seeds each; the second has delays 10, 12 and 14 % longer."""
    monkeypatch.chdir(tmp_path)
    made = [make_run(Path(f"d{seed}"), seed=seed) for seed in range(3)]
    for seed in range(3):
        slowness = 1.1 + 0.02 * seed
        random = {"strategy": "optim.baselines.Random", "seed": seed, "slowness": slowness}
        made.append(make_run(Path(f"r{seed}"), **random))
    return made
