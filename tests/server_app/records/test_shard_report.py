"""The report of the shards has the same rows and labels as the shards that units load."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from rich.console import Console

from collapipe.config import Settings, load_overrides
from collapipe.errors import ConfigError
from collapipe.runs.folder import RunFolder
from collapipe.runs.rows import load_shards, make_tokenizer, report_rows
from collapipe.state import unknown_cluster
from collapipe.wire.messages import RowsReply
from server_app.records import shard_picture
from server_app.records.shard_report import add_shard, write_shard_report

LABELS = {"travel": 2, "law": 5, "food": 1, "cinema": 3, "car": 1, "[art]": 8}


def labelled(folder: Path, *overrides: str) -> Settings:
    """A run over 300 rows, in which each group of 20 rows has the same label counts."""
    labels = [name for name, often in LABELS.items() for _ in range(often)] * 15
    lines = [f"row {number},{label},{number % 5}" for number, label in enumerate(labels)]
    file = folder / "rows.csv"
    file.write_text("\n".join(["text,label,user", *lines]))
    files = [f"data.{split}_file={file}" for split in ("train", "validation", "test")]
    run = ["task=classification", "model=huggingface", "model.family=bert", "model.head=pooled"]
    run += ["data.shuffle=false", f"hydra.run.dir={folder}"]
    return load_overrides([*run, *files, *overrides])


def report(settings: Settings, folder: Path) -> tuple[list[dict[str, object]], list[str]]:
    """The units in ``shards.json``, and the lines of the printed table."""
    console = Console(width=200)
    with console.capture() as printed:
        units = range(settings.federation.num_units)
        replies = {unit: report_rows(settings, unit) for unit in units}
        labels = make_tokenizer(settings, replies.values()).labels
        write_shard_report(replies, labels, RunFolder(folder), console)
    held = json.loads((folder / "shards.json").read_text(encoding="utf-8"))["shards"]
    return held, [" ".join(line.split()) for line in printed.get().splitlines()]


@pytest.mark.parametrize("partitioner", ["iid", "dirichlet"])
def test_the_report_counts_the_rows_that_units_load(tmp_path: Path, partitioner: str) -> None:
    settings = labelled(tmp_path, f"partitioner={partitioner}", "federation.num_units=4")
    held, _ = report(settings, tmp_path)
    shards = load_shards(settings)
    assert held == [
        {"unit": unit, "rows": len(rows), "labels": settings.task.label_counts(rows)}
        for unit, rows in enumerate(shards)
    ]
    assert sum(len(rows) for rows in shards) == 300
    assert (tmp_path / "shards.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_the_most_frequent_labels_first(tmp_path: Path) -> None:
    """Labels are shown unchanged, brackets too; labels that do not fit are counted."""
    _, lines = report(labelled(tmp_path, "federation.num_units=15"), tmp_path)
    assert lines[0] == "unit rows labels"
    assert lines[1] == "0 20 [art] 8 · law 5 · cinema 3 · 3 more"
    assert lines[-1] == "… 3 more units, see shards.json"
    assert len(lines) == 14


def test_the_report_of_a_task_without_labels_has_only_row_counts(tmp_path: Path) -> None:
    settings = load_overrides([f"hydra.run.dir={tmp_path}", "task.train_rows=50"])
    held, lines = report(settings, tmp_path)
    assert held == [{"unit": n, "rows": rows, "labels": {}} for n, rows in enumerate([17, 17, 16])]
    assert lines == ["unit rows", "0 17", "1 17", "2 16"]


def test_units_without_a_shard_end_the_run(tmp_path: Path) -> None:
    """The run ends before any unit trains."""
    natural = ["partitioner=natural_id", "data.partitioner.partition_by=user"]
    held, _ = report(labelled(tmp_path, *natural, "federation.num_units=5"), tmp_path)
    assert [unit["rows"] for unit in held] == [60] * 5
    with pytest.raises(ConfigError, match=r"makes 5 shards, federation\.num_units=6"):
        report(labelled(tmp_path, *natural, "federation.num_units=6"), tmp_path)


@pytest.mark.parametrize(("units", "labels"), [(1, 1), (3, 40), (12, 3), (12, 0)])
def test_any_number_of_units_and_labels_is_drawn(
    tmp_path: Path, units: int, labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some labels have characters that matplotlib treats specially, and units may lack labels."""
    monkeypatch.setattr(shard_picture, "_MOST_UNITS", 10)
    names = [f"_$label {number} {'long' * number}" for number in range(labels)]
    counts = [dict.fromkeys(names[unit % 2 :], unit) for unit in range(units)]
    with warnings.catch_warnings(action="error"):
        shard_picture.draw(
            [*map(str, range(units))], [7] * units, counts, names, tmp_path / "shards.png"
        )
    assert (tmp_path / "shards.png").read_bytes().startswith(b"\x89PNG")


def test_a_label_that_the_font_cannot_draw_is_shown_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legend shows the label's id, and matplotlib prints no warning."""
    legends: list[list[str]] = []
    original = Axes.legend

    def legend(axes: Axes, *args: Any, **named: Any) -> Any:
        legends.append(args[1])
        return original(axes, *args, **named)

    monkeypatch.setattr(Axes, "legend", legend)
    labels = ["Kultur", "\u6587\u5316", "Îles", "a\u8d22", "тест"]
    with warnings.catch_warnings(action="error"):
        shard_picture.draw(["0"], [7], [dict.fromkeys(labels, 2)], labels, tmp_path / "shards.png")
    assert legends == [["Kultur", "label 1", "Îles", "label 3", "тест"]]


def test_the_users_matplotlib_settings_do_not_change_the_picture(tmp_path: Path) -> None:
    """One of these settings needs LaTeX, which is not installed."""
    for name, own in (("a.png", {}), ("b.png", {"text.usetex": True, "font.size": 30})):
        with rc_context(own):
            shard_picture.draw(["0"], [3], [{"a": 1}], ["a"], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_resumed_run_keeps_the_shards_of_units_that_do_not_reply(tmp_path: Path) -> None:
    folder, console = RunFolder(tmp_path), Console(quiet=True)
    state = unknown_cluster(3)
    write_shard_report({u: RowsReply(u, 9, {"a": 9}, {}) for u in range(3)}, ["a"], folder, console)
    add_shard(folder, replace(state, num_samples=5), "north", joined=2)
    write_shard_report({1: RowsReply(1, 7, {"a": 7}, {})}, ["a"], folder, console)
    assert json.loads((tmp_path / "shards.json").read_text())["shards"] == [
        {"unit": 0, "rows": 9, "labels": {"a": 9}},
        {"unit": 1, "rows": 7, "labels": {"a": 7}},
        {"unit": 2, "rows": 9, "labels": {"a": 9}},
        {"unit": 3, "rows": 5, "labels": {}, "joined": 2, "name": "north"},
    ]


def test_a_picture_that_cannot_be_drawn_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no font")

    monkeypatch.setattr(shard_picture, "draw", broken)
    replies = {0: RowsReply(0, 3, {}, {})}
    write_shard_report(replies, [], RunFolder(tmp_path), Console(quiet=True))
    assert (tmp_path / "shards.json").exists() and not (tmp_path / "shards.png").exists()
    assert caplog.messages == ["shards.png: not drawn (no font)"]


def test_the_picture_depends_only_on_the_shares_of_labels(tmp_path: Path) -> None:
    pictures = []
    for count in ({"a": 1, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 1}):
        shard_picture.draw(["0"], [3], [count], ["a", "b"], tmp_path / "shards.png")
        pictures.append((tmp_path / "shards.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_a_partitioners_missing_column_is_named(tmp_path: Path) -> None:
    settings = labelled(tmp_path, "partitioner=natural_id", "data.partitioner.partition_by=usr")
    with pytest.raises(ConfigError, match="partition_by=usr: the rows have no such column, but"):
        load_shards(settings)
