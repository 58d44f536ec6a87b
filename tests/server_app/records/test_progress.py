"""Device names and error messages of units are shown as text; control characters become spaces."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from round_report import round_report

from collapipe.formatting import print_line, print_lines
from collapipe.report import ClusterCost, RoundCost, UnitsEvaluation
from server_app.records.progress import RunProgress, end_table, evaluation_lines

CALLED = "unit {}".format


def test_markup_is_shown_as_text() -> None:
    shown = io.StringIO()
    Console(file=shown, width=80).print(end_table([("[b]", "2 [/b] + 4 \x1b[31mred\nline")]))
    assert shown.getvalue().split() == ["[b]", "2", "[/b]", "+", "4", "[31mred", "line"]


def test_a_line_is_printed_unchanged() -> None:
    """A folder may have a name that looks like an emoji's or like markup, and may be long."""
    shown, path = io.StringIO(), f"/runs/:bee:/[b]/{'long ' * 30}1"
    print_line(console := Console(file=shown, width=40, force_terminal=True), path)
    print_lines(console, [("folder", "/:bee:/[b]/1")])
    assert shown.getvalue() == f"{path}\nfolder      /:bee:/[b]/1\n"


def test_the_table_at_the_end_shows_a_long_path_whole() -> None:
    shown = io.StringIO()
    Console(file=shown, width=40).print(end_table([("folder", path := "/a" * 60)]))
    assert "".join(shown.getvalue().split()) == f"folder{path}"


def test_80_columns_have_room_for_all_figures_of_the_progress() -> None:
    console = Console(file=(shown := io.StringIO()), width=80, force_terminal=True)
    with RunProgress(console, 15, 60, CALLED) as progress:
        progress.round(round_report(15, train_loss=0.5, samples=3840), 1.0)
    assert "…" not in shown.getvalue()
    assert re.search(r"round .*15/15.*900/900.*3,840 samples/s.*0:00:00", shown.getvalue())


def test_each_cause_is_shown_once_and_in_one_line() -> None:
    shown = io.StringIO()
    with RunProgress(Console(file=shown, width=80), 9, 1, CALLED) as progress:
        progress.round(round_report(1, failures={0: "gone\x1b[2J\nfor good"}), 1.0)
        for number, why in enumerate(("all are away", "all are away", "no channel", None), 2):
            progress.round(round_report(number, skipped=why, excluded={1: "a\nb"}), 1.0)
        progress.round(round_report(6, skipped="no channel"), 1.0)
    lines = [line for line in shown.getvalue().splitlines() if "excluded" not in line]
    assert lines == [
        "round 1: ended without unit 0: gone [2J for good",
        "round 2: skipped: all are away",
        "round 3: skipped: for the same reason",
        "round 4: skipped: no channel",
        "round 6: skipped: no channel",
    ]
    assert shown.getvalue().count("excluded unit 1: a b\n") == 1


def test_a_cause_of_many_units_takes_one_line() -> None:
    many, shown = dict.fromkeys(range(200), "gone"), io.StringIO()
    few = "unit 0, unit 1, unit 2 and 197 more"
    with RunProgress(Console(file=shown, width=80), 9, 1, CALLED) as progress:
        progress.round(round_report(1, failures={**many, 7: "late"}, excluded=many), 1.0)
    assert shown.getvalue().splitlines() == [
        f"round 1: excluded {few}: gone",
        "round 1: ended without unit 0, unit 1, unit 2 and 196 more: gone",
        "round 1: ended without unit 7: late",
    ]
    causes = {unit: f"DataError: unit {unit}: gone" for unit in many}
    units = UnitsEvaluation(dict.fromkeys(range(200), 0), causes)
    assert [*evaluation_lines(units, CALLED)] == [
        "no evaluation on units: no unit sent results",
        f"no rows to evaluate on: {few}",
        f"evaluated without {few}: DataError: gone",
    ]


def test_the_lines_of_a_round_show_units_by_name() -> None:
    shown = io.StringIO()
    report = round_report(1, train_loss=0.5, samples=10, failures={1: "gone"}, excluded={0: "away"})
    slow = replace(report, events={1: ("lost box",)})
    called = ["berlin", "paris", "rome"].__getitem__
    with RunProgress(Console(file=shown, width=80), 1, 1, called) as progress:
        progress.round(slow, 1.0)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 4 and not any("unit" in line or "pipeline" in line for line in lines)
    assert all(
        name in line for name, line in zip(("berlin", "paris", "paris"), lines, strict=False)
    )


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({}, "round 1: paris: pipeline of 1.50 s, modelled"),
        ({1: 3.0}, "round 1: paris: pipeline took 3.00 s, 2.00 times the planned 1.50 s"),
    ],
)
def test_the_duration_of_a_pipeline_is_logged_at_level_info(
    caplog: pytest.LogCaptureFixture, measured: dict[int, float], expected: str
) -> None:
    """``collapipe -v`` shows this log; for simulated devices the duration is modelled."""
    cost = RoundCost(2.0, (ClusterCost(1, 1.5, None, 0.0, {}, 1.5),))
    report = replace(round_report(1, cost=cost), pipeline_s=measured)
    with (
        caplog.at_level("INFO", "server_app"),
        RunProgress(Console(file=io.StringIO()), 1, 1, ["berlin", "paris"].__getitem__) as progress,
    ):
        progress.round(report, 1.0)
    assert caplog.messages == [expected]


def test_speed_is_shown_in_samples_per_second() -> None:
    """The task's target tokens do not matter: in classification, each sample has one."""
    shown = io.StringIO()
    report = round_report(1, train_loss=0.5, samples=3000, target_tokens=7, input_tokens=90)
    with RunProgress(Console(file=shown, width=80), 9, 1, CALLED) as progress:
        progress.round(report, 2.0)
    assert shown.getvalue() == "round 1/9  train loss 0.5000  1,500 samples/s  2.0 s\n"


def test_speed_for_causal_text_is_shown_in_input_tokens_per_second() -> None:
    """Plain lines and the live display of steps both show tokens per second."""
    shown = io.StringIO()
    report = round_report(1, train_loss=0.5, samples=1, target_tokens=7, input_tokens=3000)
    with RunProgress(Console(file=shown, width=80), 9, 1, CALLED, tokens=True) as progress:
        progress.round(report, 2.0)
    assert shown.getvalue() == "round 1/9  train loss 0.5000  1,500 tokens/s  2.0 s\n"
    terminal = Console(file=(live := io.StringIO()), width=120, force_terminal=True)
    with RunProgress(terminal, 9, 1, CALLED, tokens=True) as progress:
        progress.step(0, 0, 0.5, samples=1, tokens=10**12)
    speeds = re.findall(r"· ([\d,]+) tokens/s", live.getvalue())
    assert int(speeds[-1].replace(",", "")) > 10**9
