"""Input that cannot be reported gives an error of one line."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import full_disk
from made_run import write_summary

Command = Callable[..., tuple[int, str, str]]
LINES = "metrics.jsonl"
pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_file_that_is_not_a_report_is_not_replaced(run: Path, command: Command) -> None:
    (run / "report.html").write_text("<p>my notes")
    status, _, err = command("report", run)
    assert status == 2
    assert err.endswith("report.html: exists and is not a report; choose another --output\n")
    assert (run / "report.html").read_text() == "<p>my notes"


def _replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (LINES, lambda text: "{]\n" + text, ":1: not JSON as a run writes it"),
        (LINES, _replaced('"round": 2', '"round": "two"'), ":2: round: "),
        (LINES, _replaced('"round": 2', '"round": 1'), ":2: round 1 after round 1"),
        (LINES, _replaced('"round": 2', '"round": 3'), ":2: round 3 after round 1; the rounds"),
        (LINES, _replaced('"wall_s": ', '"wall_s": 1e999, "x": '), "(1e999 is no figure"),
        (LINES, _replaced('"samples": ', f'"samples": 1{"0" * 50}, "x": '), "(1000000000"),
        (LINES, _replaced('"wall_s": ', '"wall_s": NaN, "x": '), "(NaN is no figure of a run)"),
        (LINES, _replaced('"failures": {}', '"failures": {"8": "x"}'), ":1: unit 8; federation."),
        (LINES, _replaced('"gammas": [', '"gammas": [1.0, '), ":1: plan.gammas: 9; federation."),
        (LINES, _replaced('"first": 0', '"first": 3'), "segment on device-0 starts at block 3"),
        (LINES, lambda text: "[" * 100_000 + "\n" + text, ":1: not JSON"),
        (LINES, _replaced('"num_micro_batches": 4', '"num_micro_batches": 99999'), "micro-batches"),
        (LINES, _replaced('"pipeline_s": ', '"pipeline_s": -1e29, "x": '), "pipeline_s: "),
        (LINES, _replaced('"failures": {}', '"failures": {"' + "x" * 9999 + '": "x"}'), "x …: "),
        (LINES, _replaced('"clock_s": ', '"x": '), ":1: clock_s is missing"),
        (LINES, _replaced('"finish_s": ', '"x": '), "finish_s is missing"),
        ("summary.json", lambda _: "{}", ": status is missing"),
        ("summary.json", lambda _: "", ": not JSON as a run writes it"),
        ("shards.json", lambda _: "[]", ": must be keys with values"),
        ("choices.json", lambda _: '{"strategy": 1}', ": strategy: "),
        ("choices.json", lambda _: "[" * 100_000, ": not JSON as a run writes it"),
        ("config.yaml", lambda _: "a: [", ": not a saved configuration"),
        ("config.yaml", lambda text: text + "a: " + "[" * 99_000, ": not a saved configuration"),
        ("config.yaml", lambda text: text + "a: " + "[" * 10**6, "(more than 100,000 characters)"),
        ("config.yaml", _replaced("rounds: ", "rounds: 0x" + "f" * 5000), "out of range"),
        ("config.yaml", _replaced("units: 8", "units: 1000000000"), "federation.num_units: "),
        ("config.yaml", lambda _: "a: &b [1]\nc: *b", ": has references"),
        ("config.yaml", _replaced("units: 8", "units: many"), "federation.num_units: "),
        ("config.yaml", lambda _: "seed: 1", ": federation is missing"),
        ("config.yaml", _replaced("  clock: modelled\n", ""), "federation.clock is missing"),
    ],
)
def test_a_damaged_folder_gives_an_error_of_one_line(
    file: str, damage: Callable[[str], str], message: str, run: Path, command: Command
) -> None:
    text = (run / file).read_text() if (run / file).exists() else ""
    (run / file).write_text(damage(text))
    status, out, err = command("report", run)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {run / file}") and message in err


@pytest.mark.parametrize("status", ["failed", "completed"])
def test_a_completed_run_must_have_all_its_rounds(status: str, run: Path, command: Command) -> None:
    """A run that failed may have counted a round that it could not write."""
    text = (run / LINES).read_text()
    write_summary(run, status=status, rounds_completed=text.count("\n"))
    assert command("report", run)[0] == 0
    (run / LINES).write_text(text[:-1])
    expected = f"error: {run / LINES}: has 19 rounds, summary.json counts 20; restore the file\n"
    assert command("report", run)[1:] == ("", expected) or status == "failed"


def test_a_run_without_its_file_of_choices_gives_an_error_of_one_line(
    run: Path, command: Command
) -> None:
    (run / "choices.json").unlink()
    expected = f"error: {run / 'choices.json'}: is missing; restore it\n"
    assert command("report", run) == (2, "", expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["d0", "d1", "--round", "3"], "--round 3: is drawn for one run, not for 2"),
        (["d0", "d0"], "d0: has the configuration and seed of d0; name one of the two"),
        (["d0", "--output", "no/such/x.html"], "no/such/x.html: cannot be written"),
        (["d0", "--output", "d1"], "d1: cannot be written"),
    ],
)
def test_bad_arguments_give_an_error_of_one_line(
    arguments: list[str], message: str, runs: list[Path], command: Command
) -> None:
    status, out, err = command("report", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_error_for_the_folder_of_a_sweep_names_a_run_in_it(
    runs: list[Path], command: Command
) -> None:
    (sweep := runs[0].parent / "sweep").mkdir()
    runs[0].rename(sweep / "0")
    assert command("report", sweep)[2].endswith(f"name the runs of this sweep, such as {sweep}/0\n")


def test_a_page_that_cannot_be_written_keeps_the_previous_one(run: Path, command: Command) -> None:
    assert command("report", run)[0] == 0
    files = sorted(run.iterdir())
    before = (run / "report.html").read_bytes()
    (run / "report.html").chmod(0o600)
    assert command("report", run)[0] == 0
    assert (run / "report.html").stat().st_mode & 0o777 == 0o600
    with full_disk():
        status, _, err = command("report", run)
    assert (status, (run / "report.html").read_bytes()) == (2, before)
    assert "cannot be written (File too large); choose another --output" in err
    assert sorted(run.iterdir()) == files


@pytest.mark.parametrize(
    ("unit", "message"),
    [(b"a", "(a line without end); restore or delete it"), (b"\n", "lacks round 20; restore it")],
)
def test_a_small_file_is_not_unpacked_without_limit(
    unit: bytes, message: str, run: Path, command: Command
) -> None:
    """The file would unpack to 16 GiB of one line or of empty lines."""
    part = gzip.compress(unit * 2**22)
    (run / "requests.jsonl.gz").write_bytes(part * 4096)
    status, _, err = command("report", run)
    assert (status, message in err) == (2, True)


def test_a_report_is_not_written_to_a_link_or_a_pipe(
    run: Path, tmp_path: Path, command: Command
) -> None:
    (run / "report.html").symlink_to(tmp_path / "new")
    status, _, err = command("report", run)
    assert (status, err.endswith("report.html: is a link; choose another --output\n")) == (2, True)
    assert not (tmp_path / "new").exists()
    (run / "report.html").unlink()
    os.mkfifo(run / "report.html")
    assert command("report", run)[2].endswith("is no file; choose another --output\n")
