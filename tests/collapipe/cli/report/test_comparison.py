"""``collapipe report RUN_DIR RUN_DIR …``: groups, intervals over seeds, pairs."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import made_lines, make_run, write_lines
from report_page import Page


def test_runs_are_grouped_by_what_differs_but_the_seed(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    page = report(*runs)
    assert Path("report.html").exists()
    assert "6 runs, 2 configurations" in page.texts
    assert ["", "strategy=Dssra", "strategy=Random"] in page.cells
    assert page.rows("seeds") == [["seeds", "0 1 2", "0 1 2"]]


def test_differences_are_paired_by_seed_with_students_interval(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    page = report(*runs, "--output", "compared.html")
    cell = page.rows("clock, s modelled")[-1][1]
    mean, low, high = (float(number) for number in re.findall(r"[+-][\d.]+", cell))
    half = 4.302653 * 2.0 / math.sqrt(3)  # t(0.975, 2) times the deviation of 10, 12 and 14
    assert mean == pytest.approx(12)
    assert (low, high) == pytest.approx((12 - half, 12 + half), rel=1e-3)


def test_only_common_seeds_are_paired(runs: list[Path], report: Callable[..., Page]) -> None:
    page = report(*runs[:2], *runs[4:])
    assert page.rows("common seeds") == [["common seeds", "1"]]
    assert page.rows("seeds") == [["seeds", "0 1", "1 2"]]


def test_a_name_tells_what_differs_within_a_kind(
    tmp_path: Path, report: Callable[..., Page]
) -> None:
    slow = make_run(tmp_path / "a", drift_weight=10)
    fast = make_run(tmp_path / "b", drift_weight=0.1)
    other = make_run(tmp_path / "c", strategy="mine.Dssra", drift_weight=0.1)
    page = report(slow, fast, other, "--output", tmp_path / "report.html")
    assert set(page.rows("")[0][1:]) == {
        "strategy=optim.dssra.Dssra strategy.drift_weight=10",
        "strategy=optim.dssra.Dssra strategy.drift_weight=0.1",
        "strategy=mine.Dssra",
    }


def test_runs_of_unequal_length_are_named_so(runs: list[Path], report: Callable[..., Page]) -> None:
    write_lines(runs[0], list(made_lines(20))[:5])
    opening = "Runs have between 5 and 20 rounds: totals are not of equal work."
    assert opening in report(*runs).text
