"""A round's report is read as it was written; its row in ``metrics.csv`` has the same values."""

import csv
import io
import json
from dataclasses import replace

import pytest
from made_run import FAILED, SET_ASIDE, SKIPPED, made_lines
from pydantic import TypeAdapter

from collapipe.report import RoundReport
from server_app.records.run_log import csv_row

ADAPTER = TypeAdapter(RoundReport)
LINES = [ADAPTER.validate_python(line) for line in made_lines(20)]
COLUMNS = tuple(csv_row(LINES[0]))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"round-{line.round}")
def test_a_row_has_a_cell_for_each_column_and_the_values_of_its_line(line: RoundReport) -> None:
    row = csv_row(line)
    assert tuple(row) == COLUMNS
    for name in (
        "round",
        "samples",
        "target_tokens",
        "input_tokens",
        "clock_s",
        "bytes_up",
        "wall_s",
    ):
        assert row[name] == getattr(line, name)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"round-{line.round}")
def test_a_written_report_is_read_unchanged(line: RoundReport) -> None:
    tree = json.loads(json.dumps(line.json_tree(), allow_nan=False))
    assert ADAPTER.validate_python(tree) == line
    assert ("metric" in tree) is (line.metric is not None)


def test_energy_is_the_sum_over_all_units() -> None:
    row, costs = csv_row(LINES[0]), LINES[0].costs.values()
    assert len(costs) > 1
    assert row["upload_energy_j"] == pytest.approx(sum(c.upload_energy_j for c in costs))
    each = [joules for c in costs for joules in c.device_energy_j.values()]
    assert row["device_energy_j"] == pytest.approx(sum(each))


def test_missing_values_of_a_round_are_empty_cells() -> None:
    skipped = csv_row(LINES[SKIPPED - 1])
    assert [skipped[name] for name in ("train_loss", "trained_units", "metric_value")] == [""] * 3
    assert skipped["skipped"] == "no unit can afford its upload"
    queued = csv_row(replace(LINES[0], queues=(1.0, 5.0, 0.0)))
    assert (queued["longest_queue"], queued["mean_queue"]) == (5.0, 2.0)
    queueless = csv_row(replace(LINES[0], plan=replace(LINES[0].plan, queues=())))
    assert (queueless["longest_queue"], queueless["mean_queue"]) == ("", "")


def test_scheduled_trained_failed_and_excluded_units_have_separate_cells() -> None:
    failed, aside = csv_row(LINES[FAILED[0] - 1]), csv_row(LINES[SET_ASIDE[0] - 1])
    scheduled = str(failed["scheduled_units"]).split()
    trained, lost = str(failed["trained_units"]).split(), str(failed["failed_units"]).split()
    assert len(lost) == 1 and sorted(trained + lost) == scheduled
    assert aside["excluded_units"] == "7"


def test_rows_survive_a_csv_file() -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(map(csv_row, LINES))
    file.seek(0)
    read = list(csv.DictReader(file))
    assert [float(row["clock_s"]) for row in read] == [line.clock_s for line in LINES]
