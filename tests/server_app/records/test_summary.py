"""The line at a run's start, and the status and the table at its end."""

from pathlib import Path

import pytest
from rich.console import Console
from round_report import round_report

from collapipe.config import load_overrides
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterCost, RoundCost
from collapipe.runs.folder import RunFolder
from server_app.records.summary import (
    History,
    _end_rows,
    _outcome,
    clock_text,
    opening,
    sent,
    summarised,
)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(0)]
)  # Flower stops a run with SystemExit
def test_a_stopped_run_has_the_status_interrupted(error: BaseException) -> None:
    assert _outcome(error) == ("interrupted", "interrupted", 130)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ""),
        (["federation.num_units=5"], ""),
        (["federation.num_units=5", "channel.num_channels=3"], " 3 of 5 units a round,"),
        (["federation.num_units=5", "strategy=random", "strategy.num_scheduled=2"], " 2 of 5 "),
        (["federation.num_units=5", "strategy=all", "channel.num_channels=3"], ""),
    ],
)
def test_the_opening_line_says_if_a_round_has_fewer_units_than_the_run(
    tmp_path: Path, options: list[str], expected: str
) -> None:
    line = opening(load_overrides(options), RunFolder(tmp_path))
    assert ("units a round" in line) == bool(expected)
    assert expected in line


def test_a_unit_may_have_the_name_of_another_row() -> None:
    names = ["run", "clock", "bytes"]
    settings = load_overrides(["federation.num_units=3"])
    history = History(0.0, bytes_up=1)
    rows = _end_rows(history, settings, "completed", 1.0, names.__getitem__)
    assert [name for name, _ in rows] == ["run", "clock", *names, "bytes"]


def test_only_a_run_that_trained_has_a_speed() -> None:
    settings = load_overrides(
        ["task=causal_lm", "data=synthetic", "model=huggingface", "model.family=gpt2"]
    )
    for tokens in (0, 6):
        history = History(0.0, input_tokens=tokens, rounds_s=2.0)
        rows = dict(_end_rows(history, settings, "completed", 1.0, str))
        assert rows.get("speed") == ("3 tokens/s in rounds" if tokens else None)


def test_a_run_that_ends_early_names_the_cause() -> None:
    settings = load_overrides([])
    for ended in (None, "privacy.max_epsilon=1 is spent"):
        rows = dict(_end_rows(History(0.0, ended=ended), settings, "completed", 1.0, str))
        assert rows.get("ended early") == ended


def test_a_unit_without_segments_has_the_whole_model_on_each_device() -> None:
    settings = load_overrides(["framework=vanilla_fl", "federation.num_units=1"])
    history = History(0.0, plans={0: ClusterPlan(0, (), 1, "gpipe")})
    rows = dict(_end_rows(history, settings, "completed", 1.0, "unit {}".format))
    assert rows["unit 0"] == "0 rounds, last plan the whole model on each device"


def test_a_run_that_sent_nothing_has_no_row_of_bytes() -> None:
    assert sent(History(0.0)) == {}
    expected = {"bytes": "1,234.5 MB up, 0.1 MB down"}
    assert sent(History(0.0, bytes_up=1_234_500_000, bytes_down=100_000)) == expected


@pytest.mark.parametrize(
    ("upload_s", "clock", "expected"),
    [
        (1.5, "modelled", "12.0 s, modelled"),
        (None, "modelled", "12.0 s, modelled, uploads not counted"),
        (None, "real", "12.0 s, measured"),
    ],
)
def test_the_summary_says_if_the_clock_excludes_uploads(
    upload_s: float | None, clock: str, expected: str
) -> None:
    history = History(0.0)
    for each in (upload_s, 1.5):  # one round without an upload time is enough
        cost = ClusterCost(0, 10.5, each, 0.0, {}, 10.5)
        history.add(round_report(cost=RoundCost(cost.pipeline_s, (cost,)), units=(0,)))
    assert clock_text(history, clock) == expected


def test_energy_is_the_sum_of_uploads_and_devices_over_all_rounds() -> None:
    history = History(0.0)
    costs = (
        ClusterCost(0, 10.5, 1.5, 2.0, {"a": 3.0, "b": 4.0}, 12.0),
        ClusterCost(1, 1.0, 1.0, 5.0, {}, 2.0),
    )
    for _ in range(2):
        history.add(round_report(cost=RoundCost(12.0, costs)))
    assert history.energy_j == 2 * (2 + 3 + 4 + 5)


def test_a_run_that_ends_early_prints_the_whole_command_that_resumes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that name other machines must be repeated."""
    option = "tracking.mlflow=http://192.0.2.1"
    settings = load_overrides([option, f"hydra.run.dir={tmp_path}"])
    parts = RunFolder(tmp_path), settings, History(0.0, num_rounds=4), Console(width=200), str
    (tmp_path / "checkpoints" / "000004").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), summarised(*parts):
        raise KeyboardInterrupt
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"go on after round 4 with: collapipe resume {tmp_path} {option}"
