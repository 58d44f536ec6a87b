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


def test_a_round_that_was_skipped_has_no_delay(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    """Else who skips many rounds would seem fast."""
    page = report(*runs)
    shown = float(page.rows("delay of a round, s modelled")[0][1].split()[0])
    means = [
        sum(line["cost"]["delay_s"] for line in made_lines(20, seed=seed)) / 19 for seed in range(3)
    ]
    assert shown == pytest.approx(sum(means) / 3, rel=1e-3)


def test_who_keeps_no_queues_has_no_longest_one(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder, seed in zip(runs[3:], range(3), strict=True):
        lines = list(made_lines(20, seed=seed))
        for line in lines:
            line["queues"] = [0.0] * 8  # as the scheduler has them for any strategy
            line["plan"] |= {"gammas": [], "queues": [], "idle_queues": []}
        write_lines(folder, lines)
    ours, theirs = report(*runs).rows("longest queue at the end")[0][1:]
    assert float(ours.split()[0]) > 0
    assert theirs == "–"
    assert "The strategy keeps no queues." in report(runs[3]).texts


def test_runs_of_unequal_length_are_named_so(runs: list[Path], report: Callable[..., Page]) -> None:
    write_lines(runs[0], list(made_lines(20))[:5])
    opening = "Runs have between 5 and 20 rounds: totals are not of equal work."
    assert opening in report(*runs).text
