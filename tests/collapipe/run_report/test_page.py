"""``collapipe report RUN_DIR`` writes a self-contained page that shows the run's data."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from made_run import (
    FAILED,
    SET_ASIDE,
    SKIPPED,
    made_lines,
    make_run,
    without_uploads,
    write_lines,
    write_summary,
)
from report_page import Page

from collapipe.formatting import seconds
from collapipe.run_report import units
from collapipe.run_report.charts import Row
from collapipe.run_report.costs import phases
from collapipe.run_report.learning import EPSILON, Curve
from collapipe.run_report.units import drifts
from collapipe.runs.reading import read_run

Command = Callable[..., tuple[int, str, str]]
EVIL = "<script>alert('x')</script><img src=http://evil.example/p.png onerror=alert(1)>\"'&"


def test_the_page_needs_no_other_file_and_no_script(
    run: Path, drawn_report: Callable[..., Page]
) -> None:
    page = drawn_report(run)
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "foreignobject"}
    assert "use" in names
    places = [value for _, attributes in page.elements if (value := attributes.get("id"))]
    assert len(set(places)) == len(places)
    for _, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on") or key == "src"]
        for key in ("href", "xlink:href"):
            link = attributes.get(key)
            assert link is None or link.removeprefix("#") in places
    assert "url(" not in page.source and "@import" not in page.source
    policies = [each["content"] for each in page.tags("meta") if "http-equiv" in each]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]


def test_all_sections_are_there_and_linked(run: Path, report: Callable[..., Page]) -> None:
    page = report(run)
    places = {each["id"] for each in page.tags("section")}
    links = {str(each["href"]).removeprefix("#") for each in page.tags("a")}
    assert links == places | {"figures"}
    assert {"learning", "units", "round", "time", "predicted"} <= places
    assert {"queues", "radio", "energy", "bytes", "all"} <= places
    labels = [each["aria-label"] for each in page.tags("svg") if each.get("role") == "img"]
    for axis in ("rounds", "samples", "seconds"):
        assert {f"Loss against {axis}", f"BLEU against {axis}"} <= set(labels)
    assert all(labels) and len(set(labels)) == len(labels)


def test_a_private_runs_epsilon_is_drawn_for_each_round(
    run: Path, report: Callable[..., Page]
) -> None:
    charts = {
        f"Privacy of a unit, ε of all rounds so far against {axis}"
        for axis in ("rounds", "samples", "seconds")
    }
    assert not charts & {each.get("aria-label") for each in report(run).tags("svg")}
    write_lines(run, [{**line, "epsilon": 0.5 * line["round"]} for line in made_lines(20)])
    assert charts <= {each.get("aria-label") for each in report(run).tags("svg")}
    points = Curve("ε", 0, [read_run(run)], EPSILON).series("round").points
    assert points == [(n, 0.5 * n) for n in range(1, 21)]


def test_labels_show_whether_values_are_modelled_or_measured(
    run: Path, report: Callable[..., Page]
) -> None:
    page = report(run)
    for label in ("seconds, modelled", "seconds, measured", "Round 20, modelled"):
        assert label in page.texts
    real = (run / "config.yaml").read_text().replace("clock: modelled", "clock: real")
    (run / "config.yaml").write_text(real)
    texts = report(run).texts
    assert "clock, measured" in texts and "clock, modelled" not in texts


def test_the_table_shows_the_values_of_every_round(run: Path, report: Callable[..., Page]) -> None:
    page = report(run)
    for line in made_lines(20):
        (row,) = [row for row in page.rows(str(line["round"])) if len(row) == 12]
        loss = "–" if line["train_loss"] is None else f"{line['train_loss']:.5g}"
        assert row[1] == loss
        assert row[4].replace(",", "") == str(line["samples"])
        assert row[5] == (", ".join(f"unit {unit}" for unit in line["units"]) or "–")
        assert row[6] == f"{line['clock_s']:,.2f} s"
        assert row[7] == f"{line['cost']['delay_s']:,.2f} s"


def test_failed_and_excluded_units_and_skipped_rounds_have_their_cause(
    run: Path, report: Callable[..., Page]
) -> None:
    page = report(run)
    outcomes = {(row[0], row[2]): row[3] for row in page.cells if len(row) == 4}
    assert outcomes[str(SKIPPED), "round skipped"] == "no unit can afford its upload"
    for number in FAILED:
        assert outcomes[str(number), "failed"] == "LinkError: the unit was switched off"
    for number in SET_ASIDE:
        assert outcomes[str(number), "excluded"] == "WireError: a speed that is not finite"
    assert len([key for key in outcomes if key[0].isdigit()]) == 1 + len(FAILED) + len(SET_ASIDE)


def test_the_participation_matrix_marks_the_rounds_in_which_units_trained(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "cells", lambda title, rows, rounds: drawn.append((rows, rounds)))
    drawn, lines = list[tuple[Sequence[Row], Sequence[int]]](), list(made_lines(20))
    units.participation(read_run(run))
    ((rows, rounds),) = drawn
    assert rounds == [*range(1, 21)]
    assert [row.name for row in rows] == [f"unit {unit}" for unit in range(8)]
    for unit, row in enumerate(rows):
        trained = [span for kind, span in row.boxes if kind.name == "trained"]
        expected = [line["round"] for line in lines if unit in line["units"]]
        assert trained == [(number, number) for number in expected]
        assert row.caption == f"{len(expected)}, {len(expected) / 20:.0%}"


def test_the_round_of_the_gantt_chart_can_be_chosen(
    run: Path, report: Callable[..., Page], command: Command
) -> None:
    page, line = report(run, "--round", 4), list(made_lines(20))[3]
    assert "Round 4, modelled" in page.texts
    for cost in line["cost"]["clusters"]:
        (row,) = [
            row for row in page.rows(f"unit {cost['unit']}") if len(row) == 9 and "device" in row[1]
        ]
        assert row[4] == seconds(cost["pipeline_s"])
        assert row[7:] == [
            seconds(cost["upload_s"]),
            seconds(cost["pipeline_s"] + cost["upload_s"]),
        ]
    status, _, err = command("report", run, "--round", SKIPPED)
    assert status == 2
    assert err.endswith(f"--round 7: {run} has no plan of it; planned rounds: 1 … 20\n")


def test_energies_are_summed_over_all_rounds(run: Path, report: Callable[..., Page]) -> None:
    page = report(run)
    costs = [cost for line in made_lines(20) for cost in line["cost"]["clusters"]]
    for unit in range(8):
        own = [cost for cost in costs if cost["unit"] == unit]
        rows = {row[1]: row[2] for row in page.rows(f"unit {unit}") if len(row) == 3}
        uploads = math.fsum(cost["upload_energy_j"] for cost in own)
        assert rows["upload"] == f"{uploads:.4g} J"
        for device in ("device-0", "device-2"):
            joules = math.fsum(cost["device_energy_j"][device] for cost in own)
            assert rows[device] == f"{joules:.4g} J"


def test_html_in_a_runs_text_is_escaped(tmp_path: Path, drawn_report: Callable[..., Page]) -> None:
    run = make_run(tmp_path / "<b>run&")
    config = (run / "config.yaml").read_text() + f"note: {json.dumps(EVIL)}\n"
    (run / "config.yaml").write_text(config.replace("name: collapipe", f"name: {json.dumps(EVIL)}"))
    lines = list(made_lines(20))
    lines[9]["metric"]["name"] = EVIL
    lines[2]["failures"] = {0: EVIL}
    lines[2]["seconds"][f"unit/{EVIL}"] = 1.0
    lines[-1]["plan"]["clusters"][0]["segments"][0]["device"] = EVIL
    lines[-1]["cost"]["clusters"][0]["device_energy_j"] = {EVIL: 1.0}
    write_lines(run, lines)
    metric = {"name": EVIL, "value": 1.0, "signature": EVIL, "extra_metrics": {}}
    write_summary(run, status="failed", error=EVIL, metric=metric)
    page = drawn_report(run)
    names = {name for name, _ in page.elements}
    assert not names & {"script", "img", "b"}
    assert not [key for _, attributes in page.elements for key in attributes if key == "onerror"]
    assert sum(EVIL in text for text in page.texts) >= 8  # the text is still shown


def test_an_unpaired_surrogate_does_not_prevent_the_page(
    run: Path, report: Callable[..., Page]
) -> None:
    lines = list(made_lines(20))
    lines[-1]["plan"]["clusters"][0]["segments"][0]["device"] = "half \ud83d of a face"
    write_lines(run, lines)
    assert "of a face" in report(run).text


@pytest.mark.parametrize("status", ["completed", "failed", "interrupted", None])
def test_a_run_with_any_final_status_has_a_page(
    status: str | None, run: Path, report: Callable[..., Page]
) -> None:
    if status is None:
        (run / "summary.json").unlink()
    else:
        error = {"failed": "round 3: every unit failed", "interrupted": "interrupted"}.get(status)
        write_summary(run, status=status, error=error, metric=None)
    opening = {
        "completed": "Completed after 20 of 20 rounds",
        "failed": "Failed after 20 of 20 rounds: round 3: every unit failed",
        "interrupted": "Interrupted after 20 of 20 rounds",
        None: "No end was written: the run is going on, or it was killed. 20 of 20 rounds.",
    }
    assert opening[status] in report(run).texts


def test_a_run_without_a_finished_round_has_a_page(
    run: Path, report: Callable[..., Page], command: Command
) -> None:
    for name in ("metrics.jsonl", "summary.json", "shards.json"):
        (run / name).unlink()
    texts = report(run).texts
    assert "No round was finished." in texts
    unknown = "The strategy keeps no queues.", "The strategy plans no channels and powers."
    assert not {*unknown} & {*texts}
    status, _, err = command("report", run, "--round", 1)
    assert (status, err.endswith("planned rounds: none\n")) == (2, True)


def test_a_run_without_training_has_a_page(run: Path, report: Callable[..., Page]) -> None:
    lines = [{**line, "train_loss": None} for line in made_lines(20)]
    for line in lines:
        line.pop("metric", None)
        line.pop("evaluation_loss", None)
    write_lines(run, lines)
    assert "There is no loss and no metric to draw." in report(run).texts


def test_a_run_that_only_scheduled_has_no_measured_rounds(
    run: Path, report: Callable[..., Page]
) -> None:
    """The planning time of such a run is not a measurement of the modelled delay."""
    assert "Measured against modelled" in report(run).texts
    write_lines(run, [{**line, "seconds": {"plan": 1.0, "round": 1.0}} for line in made_lines(20)])
    page = report(run)
    assert "Modelled delay of each round" in page.texts
    assert (
        "Nothing was trained: there is no measured time to compare with the modelled delay."
        in page.texts
    )
    assert not {"Measured time of each round", "Measured against modelled"} & set(page.texts)
    assert "Completed after 20 of 20 rounds, scheduled without training" in page.texts
    assert "took part" in " ".join(page.texts) and " trained" not in page.texts
    assert "Nothing was trained. Planning took 1.00 s a round in the mean, measured." in page.texts
    assert {row[8] for row in page.cells if len(row) == 12} == {"measured", "–"}


def test_a_run_that_sent_no_bytes_has_no_chart_of_bytes(
    run: Path, report: Callable[..., Page]
) -> None:
    write_lines(run, [{**line, "bytes_up": 0, "bytes_down": 0} for line in made_lines(20)])
    page = report(run)
    assert "Nothing was sent, neither up nor down." in page.texts
    assert "Bytes of each round" not in page.texts


def test_bytes_that_were_sent_outside_rounds_are_shown(
    run: Path, report: Callable[..., Page]
) -> None:
    """The end of the run prints them, too: they are in ``summary.json`` but in no round."""
    in_rounds = sum(line["bytes_down"] for line in made_lines(20))
    write_summary(run, status="completed", error=None, bytes_down=in_rounds)
    assert "Outside rounds" not in report(run).text
    write_summary(run, status="completed", error=None, bytes_down=in_rounds + 3_000_000)
    assert "Outside rounds the server sent 3.0 MB more" in report(run).text


def test_the_figures_of_a_run_without_uploads_are_marked(
    run: Path, report: Callable[..., Page]
) -> None:
    lines = [*without_uploads(made_lines(20))]
    write_lines(run, lines)
    page = report(run)
    assert f"{seconds(lines[-1]['clock_s'])}, modelled, uploads not counted" in page.texts
    for text in (
        "seconds, modelled; uploads not counted",
        "seconds, modelled, uploads not counted",
    ):
        assert text in page.texts  # labels of learning curves; label of the delay
    assert any(text.startswith("Uploads not counted: the strategy") for text in page.texts)
    assert "J in all, uploads not counted." in page.text


def test_the_head_of_the_page_names_the_chosen_strategy(
    run: Path, report: Callable[..., Page]
) -> None:
    (run / "choices.json").write_text('{"strategy": "dssra_paper"}')
    texts = report(run).texts
    assert texts[texts.index("strategy") + 1] == "dssra_paper"


@pytest.mark.parametrize(("num_units", "banded"), [(4, False), (8, True)])
def test_queues_of_many_units_are_a_band_with_the_two_longest_named(
    num_units: int, banded: bool, tmp_path: Path, report: Callable[..., Page]
) -> None:
    run = make_run(tmp_path / "run", num_units=num_units)
    figure = report(run).figure("Virtual queues Y after each round")
    queues = [line["queues"] for line in made_lines(20, num_units)]
    means = [sum(row[unit] for row in queues) for unit in range(num_units)]
    shown = sorted(range(num_units), key=lambda unit: -means[unit])[: 2 if banded else num_units]
    assert figure.count("<li>") == len(shown) + banded
    assert ("median of the units, least to most" in figure) == banded
    assert all(f"unit {unit}" in figure for unit in shown)


@pytest.mark.usefixtures("undrawn")
def test_a_very_long_name_does_not_make_a_very_large_page(run: Path, command: Command) -> None:
    lines = list(made_lines(20))
    lines[9]["metric"]["name"] = "x" * 1_000_000
    write_lines(run, lines)
    status, out, _ = command("report", run)
    assert status == 0
    assert Path(out.strip()).stat().st_size < 200_000


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_a_ratio_is_drawn_only_if_modelled_delays_differ(
    run: Path, report: Callable[..., Page], delay_s: float
) -> None:
    lines = [{**line, "cost": {**line["cost"], "delay_s": delay_s}} for line in made_lines(20)]
    write_lines(run, lines)
    page = report(run)
    assert ("times the modelled delay (median of rounds)" in page.text) is (delay_s > 0)
    assert "Measured time of each round" in page.texts
    assert "Measured against modelled" not in page.texts


def test_phases_of_the_server_add_up(run: Path) -> None:
    """As ``Phases`` measures them: the time of sending does not include that of planning."""
    seconds_ = {"plan": 1.0, "send": 3.0, "train": 5.0, "aggregate": 1.0, "round": 10.0}
    write_lines(run, [{**line, "seconds": seconds_} for line in made_lines(20)])
    texts = Page(phases(read_run(run))).texts
    for share in ("10.0%", "30.0%", "50.0%"):
        assert any(text.endswith(f", {share}") for text in texts)


def test_the_mean_round_of_a_unit_leaves_out_skipped_rounds(run: Path) -> None:
    lines = list(made_lines(4))
    for line in lines:
        line["seconds"] = {"train": 4.0, "round": 4.0, "unit/forward": 2.5}
    del lines[2]["seconds"]["unit/forward"]
    write_lines(run, lines)
    assert seconds(2.5) in Page(phases(read_run(run))).texts


def test_the_mean_drift_counts_skipped_rounds_and_failed_units(
    run: Path,
) -> None:
    """Skipped rounds and failed units count with the Γ of idle units, not with the plan's Γ."""
    shown = dict(drifts(read_run(run), 0.84))
    assert list(shown) == list(range(1, 21))
    assert shown[SKIPPED] == pytest.approx([1.24] * 8)
    lines = list(made_lines(20))
    lines[1]["failures"] = {lines[1]["units"][0]: "gone"}
    lines[1]["queues"] = [queue + 0.4 for queue in lines[0]["queues"]]
    write_lines(run, lines)
    failed = dict(drifts(read_run(run), 0.84))[2]
    assert failed[lines[1]["units"][0]] == pytest.approx(1.24)
    assert failed[lines[1]["units"][1]] == 0.24


def test_the_page_of_a_diverged_run_shows_its_loss(run: Path, report: Callable[..., Page]) -> None:
    write_lines(run, [{**line, "train_loss": 3e38} for line in made_lines(20)])
    assert "3e+38" in report(run).text


def test_an_incomplete_last_line_is_left_out(run: Path, report: Callable[..., Page]) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-100])
    assert [row for row in report(run).rows("19") if len(row) == 12]
    assert not [row for row in report(run).rows("20") if len(row) == 12]


def test_the_page_of_a_long_run_is_small(tmp_path: Path, command: Command) -> None:
    run = make_run(tmp_path / "long", rounds=200)
    status, out, _ = command("report", run)
    assert status == 0
    assert Path(out.strip()).stat().st_size < 1_000_000


@pytest.mark.usefixtures("undrawn")
def test_the_same_folder_makes_the_same_page(run: Path, command: Command) -> None:
    pages = []
    for _ in range(2):
        command("report", run)
        pages.append((run / "report.html").read_bytes())
    assert pages[0] == pages[1]
