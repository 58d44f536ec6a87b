"""``collapipe report RUN_DIR RUN_DIR …`` groups runs and compares them seed by seed."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from made_run import SKIPPED, made_lines, make_run, without_uploads, write_lines, write_summary
from report_page import Page

from collapipe.config.trust import read_tree
from collapipe.run_report.grouping import Group, _mark
from collapipe.run_report.learning import TRAIN_LOSS, Curve
from collapipe.runs.reading import read_run

NAMES = ("A strategy=dssra", "B strategy=random")


def test_runs_that_differ_only_in_their_seed_form_a_group(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    page = report(*runs)
    assert Path("report.html").exists()
    assert "6 runs, 2 configurations" in page.texts
    assert ["", *NAMES] in page.cells
    assert page.rows("seeds") == [["seeds", "0 1 2", "0 1 2"]]


def test_marks_of_configurations_are_those_of_a_spreadsheets_columns() -> None:
    marks = [_mark(number) for number in (0, 25, 26, 27, 51, 52, 701, 702)]
    assert marks == ["A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]


def test_the_seeds_of_a_configuration_give_one_mean_curve_with_a_band(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    page = report(*runs)
    chart = page.figure("Training loss against rounds")
    assert [chart.count(f'class="c{n}"') for n in range(3)] == [1, 1, 0]
    curves = [
        Curve("A", 0, [read_run(run) for run in some], TRAIN_LOSS) for some in (runs, runs[:1])
    ]
    assert [bool(curve.series("round").band) for curve in curves] == [True, False]


def test_a_mean_curve_has_the_rounds_that_all_seeds_have(runs: list[Path]) -> None:
    write_lines(runs[1], list(made_lines(20, seed=1))[:12])
    seeds = [read_run(folder) for folder in runs[:3]]
    series = Curve("A", 0, seeds, TRAIN_LOSS).series("round")
    assert [x for x, _ in series.points] == [n for n in range(1, 13) if n != SKIPPED]
    losses = [run.rounds[0].train_loss or 0.0 for run in seeds]
    assert series.points[0] == (1.0, pytest.approx(sum(losses) / 3))
    assert series.band[0] == (1.0, min(losses), max(losses))


def test_a_run_without_rounds_is_left_out_of_its_configurations_curve(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    (runs[1] / "metrics.jsonl").unlink()
    assert "Training loss against rounds" in report(*runs[:2]).texts
    series, alone = (
        Curve("A", 0, [read_run(run) for run in some], TRAIN_LOSS).series("round")
        for some in (runs[:2], runs[:1])
    )
    assert series == alone


def test_differences_are_paired_by_seed_with_students_interval(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    page = report(*runs, "--output", "compared.html")
    cell = page.rows("clock, s modelled")[-1][1]
    mean, low, high = (float(number) for number in re.findall(r"[+-][\d.]+", cell))
    half = 4.302653 * 2.0 / math.sqrt(3)  # t(0.975, 2) times the deviation of 10, 12 and 14
    assert mean == pytest.approx(12)
    assert (low, high) == pytest.approx((12 - half, 12 + half), rel=1e-3)


def test_rounding_errors_are_no_difference(runs: list[Path], report: Callable[..., Page]) -> None:
    """The sum of twenty times 0.1 is rounded in another way than that of twelve times."""
    for folder, rounds in (runs[0], 20), (runs[3], 12):
        lines = list(made_lines(20))[:rounds]
        del lines[SKIPPED - 1 : SKIPPED]
        numbered = [line | {"round": number} for number, line in enumerate(lines, 1)]
        write_lines(folder, [each | {"cost": each["cost"] | {"delay_s": 0.1}} for each in numbered])
    page = report(runs[0], runs[3])
    assert page.rows("delay of a round, s modelled")[-1][1] == "+0 %"


def test_a_long_name_of_a_configuration_is_shortened_in_tables() -> None:
    assert len(Group("A", "option=value " * 50, {}).title) < 70


def test_only_common_seeds_are_paired(runs: list[Path], report: Callable[..., Page]) -> None:
    page = report(*runs[:2], *runs[4:])
    assert page.rows("common seeds") == [["common seeds", "1"]]
    assert page.rows("seeds") == [["seeds", "0 1", "1 2"]]


def test_a_name_lists_the_options_that_differ_within_a_strategy(
    tmp_path: Path, report: Callable[..., Page]
) -> None:
    slow = make_run(tmp_path / "a", drift_weight=10)
    fast = make_run(tmp_path / "b", drift_weight=0.1)
    other = make_run(tmp_path / "c", strategy="mine.Fastest", drift_weight=0.1)
    (other / "choices.json").write_text('{"strategy": "dssra"}')  # overridden by the options
    page = report(slow, fast, other, "--output", tmp_path / "report.html")
    assert set(page.rows("")[0][1:]) == {
        "A strategy=dssra strategy.drift_weight=10",
        "B strategy=dssra strategy.drift_weight=0.1",
        "C strategy=mine.Fastest",
    }


def test_strategies_have_the_names_that_the_user_chose(
    tmp_path: Path, report: Callable[..., Page]
) -> None:
    chosen = {"dssra": "optim.dssra.Dssra", "loss_only": "optim.baselines.HighestLoss"}
    runs = [make_run(tmp_path / name, strategy=kind) for name, kind in chosen.items()]
    for run, name in zip(runs, chosen, strict=True):
        (run / "choices.json").write_text(f'{{"strategy": "{name}"}}')
    page = report(*runs, "--output", tmp_path / "report.html")
    assert ["", "A strategy=dssra", "B strategy=loss_only"] in page.cells


def test_a_name_lists_the_options_that_differ_within_a_choice(
    tmp_path: Path, report: Callable[..., Page]
) -> None:
    slow, fast = (make_run(tmp_path / str(v), drift_weight=v) for v in (10, 0.1))
    other = make_run(tmp_path / "c", strategy="optim.baselines.EvenSplit")
    for run, name in ((slow, "dssra"), (fast, "dssra"), (other, "even")):
        (run / "choices.json").write_text(f'{{"strategy": "{name}"}}')
    page = report(slow, fast, other, "--output", tmp_path / "report.html")
    assert page.rows("")[0][1:] == [
        "A strategy=dssra strategy.drift_weight=10",
        "B strategy=dssra strategy.drift_weight=0.1",
        "C strategy=even",
    ]


def test_the_strategy_is_first_and_values_are_written_as_in_the_file(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder, cut in ((runs[0], "null"), (runs[3], "true")):
        config = "cut: " + cut + "\n" + (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config)
    names = [f"{NAMES[0]} cut=null", f"{NAMES[1]} cut=true"]
    assert report(runs[0], runs[3]).rows("")[0][1:] == names


def test_the_full_legend_appears_once(runs: list[Path], report: Callable[..., Page]) -> None:
    texts = [text.strip() for text in report(*runs).texts]
    assert texts.count("A") == 1 + 9  # in the legend and below each of 9 charts
    assert texts.count(NAMES[0].removeprefix("A ")) == 1


def _clock_cells(page: Page) -> list[str]:
    """The second configuration's mean, and its difference from the first configuration."""
    return [row[-1] for row in page.rows("clock, s modelled")]


def test_a_run_without_uploads_is_marked_and_not_compared(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    """A clock without uploads is shorter and cannot be compared."""
    for folder, seed in zip(runs[3:], range(3), strict=True):
        write_lines(folder, [*without_uploads(made_lines(20, seed=seed))])
    page = report(*runs)
    for name in ("clock, s modelled", "delay of a round, s modelled", "energy, J modelled"):
        figures, difference = page.rows(name)
        assert "uploads" not in figures[1] and figures[2].endswith("uploads not counted")
        assert difference[1] == "– uploads not counted"
    assert page.rows("MB up")[-1][1].count("%") == 1
    assert "seconds, modelled; B: uploads not counted" in page.texts
    assert "Modelled seconds and joules of B leave out uploads" in page.text


def test_runs_that_both_leave_out_uploads_are_compared(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder in runs:
        write_lines(folder, [*without_uploads(made_lines(20))])
    mean, difference = _clock_cells(report(*runs))
    assert mean.endswith("uploads not counted")
    assert difference.startswith("+0 %")


def test_runs_that_leave_out_some_uploads_are_not_compared(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder in runs:
        lines = list(made_lines(20))
        write_lines(folder, [*without_uploads(lines[:10]), *lines[10:]])
    mean, difference = _clock_cells(report(*runs))
    assert mean.endswith("uploads counted in some rounds only")
    assert "%" not in difference


def test_measured_clocks_are_compared_even_if_uploads_are_not_modelled(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder, seed in zip(runs[3:], range(3), strict=True):
        write_lines(folder, [*without_uploads(made_lines(20, seed=seed))])
    for folder in runs:
        config = (folder / "config.yaml").read_text().replace("clock: modelled", "clock: real")
        (folder / "config.yaml").write_text(config)
    first, second = report(*runs).rows("clock, s measured")
    assert "uploads" not in first[2] and "%" in second[1]


_PERPLEXITY = "per token of the run's tokeniser:context={}:rows=8"


@pytest.mark.parametrize(
    ("signatures", "tokenisers", "compared"),
    [
        (("nrefs:1|tok:13a", "nrefs:1|tok:13a"), ("bytes", "federated"), True),
        (("nrefs:1|tok:13a", "nrefs:1|tok:13a|mean of 3 units' models"), ("bytes",) * 2, True),
        (("nrefs:1|tok:13a", "nrefs:1|tok:zh"), ("bytes",) * 2, False),
        ((_PERPLEXITY.format(16), _PERPLEXITY.format(32)), ("bytes",) * 2, False),
        ((_PERPLEXITY.format(16),) * 2, ("bytes", "federated"), False),
        ((_PERPLEXITY.format(16),) * 2, ("bytes",) * 2, True),
    ],
)
def test_metrics_with_different_signatures_or_per_token_of_different_tokenisers_are_not_compared(
    tmp_path: Path,
    report: Callable[..., Page],
    signatures: tuple[str, str],
    tokenisers: tuple[str, str],
    compared: bool,
) -> None:
    runs = [make_run(tmp_path / str(weight), drift_weight=weight) for weight in (1, 2)]
    for run, signature, tokeniser in zip(runs, signatures, tokenisers, strict=True):
        with (run / "config.yaml").open("a") as config:
            config.write(f"data:\n  tokenizer: {tokeniser}\n")
        metric = {"name": "m", "value": 9.5, "signature": signature, "extra_metrics": {}}
        write_summary(run, status="completed", error=None, metric=metric)
    figures, (_, difference) = report(*runs, "--output", tmp_path / "r.html").rows("test m")
    assert figures[1:] == ["9.5", "9.5"]
    assert difference == ("+0" if compared else "– measured differently")


@pytest.mark.parametrize(
    ("option", "labels", "compared"),
    [
        ("task: {_target_: mine.Other}", [], False),
        ("task: {_target_: collapipe.tasks.dates.Dates, max_length: 16}", [], False),
        ("task: {_target_: collapipe.tasks.dates.Dates, max_length: 16}", ["a", "b"], True),
        ("task: {_target_: collapipe.tasks.dates.Dates, train_rows: 9}", [], True),
        ("task: {_target_: collapipe.tasks.dates.Dates, vocabulary: 99}", [], False),
        ("data: {tokenizer: bytes}", [], False),
        ("data: {tokenizer: federated}", [], True),
        ("data: {max_eval_samples: 9}", ["a", "b"], False),
        ("data: {max_train_samples: 9, partitioner: {alpha: 0.1}}", [], True),
        ("model: {name: other, pretrained: true}", [], False),
        ("model: {name: other, pretrained: true}", ["a", "b"], True),
        ("model: {name: other, pretrained: false}", [], True),
        ("compression: {upload: int8}", [], True),
        ("privacy: {clip_norm: 1.0}", [], True),
    ],
)
def test_losses_of_different_tasks_data_or_tokenisers_are_not_compared(
    tmp_path: Path, report: Callable[..., Page], option: str, labels: list[str], compared: bool
) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    config = read_tree(runs[1] / "config.yaml")[1] | yaml.safe_load(option)
    (runs[1] / "config.yaml").write_text("# CollaPipe 9.8.7\n" + json.dumps(config))
    for run in runs:
        (run / "shards.json").write_text(json.dumps({"labels": labels, "shards": []}))
    page = report(*runs, "--output", tmp_path / "report.html")
    for loss in ("training loss, last", "validation loss, last"):
        assert page.rows(loss)[1][1] == ("+0" if compared else "– measured differently")


def test_validation_losses_on_different_rows_are_not_compared(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    """The signature of the last validation names them."""
    lines = list(made_lines(20))
    lines[-1]["metric"]["signature"] += ":rows=9"
    write_lines(runs[3], lines)
    page = report(runs[0], runs[3])
    shown = [page.rows(f"{name} loss, last")[1][1] for name in ("training", "validation")]
    assert shown == ["+0", "– measured differently"]


def test_a_mean_of_seeds_that_measured_differently_is_marked(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    """For example, a unit with rows of its own was missing in one of the evaluations."""
    lines = list(made_lines(20, seed=1))
    lines[-1]["metric"]["signature"] += ":rows=9"
    write_lines(runs[1], lines)
    page = report(*runs)
    first, second = page.rows("validation loss, last")[0][1:]
    assert first.endswith(" measured differently") and "measured" not in second
    assert "measured" not in page.rows("training loss, last")[0][1]


def test_skipped_rounds_do_not_count_in_the_mean_delay(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    """Otherwise a strategy that skips many rounds would seem fast."""
    page = report(*runs)
    shown = float(page.rows("delay of a round, s modelled")[0][1].split()[0])
    means = [
        sum(line["cost"]["delay_s"] for line in made_lines(20, seed=seed)) / 19 for seed in range(3)
    ]
    assert shown == pytest.approx(sum(means) / 3, rel=1e-3)


def test_a_strategy_without_queues_has_no_longest_queue(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    for folder, seed in zip(runs[3:], range(3), strict=True):
        lines = list(made_lines(20, seed=seed))
        for line in lines:
            line["queues"] = [0.0] * 8  # the scheduler writes them for every strategy
            line["plan"] |= {"gammas": [], "queues": [], "idle_queues": []}
        write_lines(folder, lines)
    first, second = report(*runs).rows("longest queue at the end")[0][1:]
    assert float(first.split()[0]) > 0
    assert second == "–"
    assert "The strategy keeps no queues." in report(runs[3]).texts


def test_a_comparison_reports_that_its_runs_have_unequal_lengths(
    runs: list[Path], report: Callable[..., Page]
) -> None:
    write_lines(runs[0], list(made_lines(20))[:5])
    opening = "Runs have between 5 and 20 rounds: totals are not of equal work."
    assert opening in report(*runs).text
