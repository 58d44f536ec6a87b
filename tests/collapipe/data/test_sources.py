"""A user's rows are read unchanged, with the task's column names; bad files are errors."""

import gzip
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from collapipe.data import hub as hub_module
from collapipe.data.folders import Splits
from collapipe.data.sources import read, standard
from collapipe.errors import ConfigError, DataError
from collapipe.sections import DataSettings

TEXTS = ["a hen", "NA", '"owl", she', " two  blanks "]
LABELS = ["007", "08", "1e3", "1.50"]  # type inference would change these
CSV = 'text,label\na hen,007\nNA,08\n"""owl"", she",1e3\n two  blanks ,1.50\n'
TSV = 'text\tlabel\na hen\t007\nNA\t08\n"owl", she\t1e3\n two  blanks \t1.50\n'
LINES = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
JSON_LINES = "".join(json.dumps(line) + "\n" for line in LINES)


def rows_of(file: Path, *columns: str, **options: Any) -> Dataset:
    """The rows of a file that is used as all three splits."""
    name = str(file)
    data = DataSettings(train_file=name, validation_file=name, test_file=name, **options)
    splits = read(data, columns, seed=0)
    assert splits.train[:] == splits.validation[:] == splits.test[:]
    return splits.train


def written(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file, compressed if its name ends in ``.gz``."""
    plain = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(plain) if name.endswith(".gz") else plain)
    return folder / name


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("csv", CSV),
        ("CSV", f"\ufeff{CSV}".replace("\n", "\r\n")),
        ("tsv", TSV),
        ("json", json.dumps(LINES)),
        ("jsonl", JSON_LINES),
    ],
)
def test_cells_are_read_unchanged(tmp_path: Path, suffix: str, content: str, packed: str) -> None:
    """No cell becomes a number or null; a file name may contain wildcard characters."""
    file = written(tmp_path, f"my [rows]*.{suffix}{packed}", content)
    rows = rows_of(file, "text", "label")
    assert rows.to_dict() == {"text": TEXTS, "label": LABELS}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_values_are_not_converted(tmp_path: Path, name: str) -> None:
    """Texts that look like dates stay texts, and integers in a column with nulls stay integers."""
    lines = [
        {"text": "2020-01-01"},
        {"text": "2021-12-31T10:00:00", "label": 7, "user": 1},
        {"text": "2022-02-03 09:30", "label": None, "user": 2},
    ]
    listed = json.dumps(lines, indent=1) if name.endswith("json") else None
    file = written(tmp_path, name, listed or "".join(json.dumps(line) + "\n" for line in lines))
    rows = rows_of(file, "text")
    assert rows["text"][:] == [line["text"] for line in lines]
    assert str(rows[1]["label"]) == "7"
    assert rows["user"][:] == [None, 1, 2]


def test_a_text_file_has_one_row_per_line(tmp_path: Path) -> None:
    """Blank lines are skipped, and a Unicode line separator (U+2028) does not end a line."""
    file = written(tmp_path, "my.txt", "\ufefffirst\r\n\n \t\nsecond\u2028line\nlast")
    assert rows_of(file, "text")["text"][:] == ["first", "second\u2028line", "last"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ner.csv", "tokens,ner_tags\nAda saw  Rome,B-PER O B-LOC\n"),
        ("ner.jsonl", '{"tokens": ["Ada","saw","Rome"], "ner_tags": ["B-PER","O","B-LOC"]}\n'),
    ],
)
def test_tokens_and_tags_are_read_as_lists(tmp_path: Path, name: str, content: str) -> None:
    rows = rows_of(written(tmp_path, name, content), "tokens", "tags")
    assert rows.to_dict() == {
        "tokens": [["Ada", "saw", "Rome"]],
        "tags": [["B-PER", "O", "B-LOC"]],
    }


def test_label_numbers_become_label_names() -> None:
    topics, tags = ClassLabel(names=["sport", "art"]), ClassLabel(names=["O", "B-PER"])
    features = Features(
        {
            "label": topics,
            "tokens": List(Value("string")),
            "tags": List(tags),
            "text": Value("int8"),
        }
    )
    cells = {"label": [1, 0], "tokens": [["a"], ["b"]], "tags": [[1], [0]], "text": [5, 6]}
    rows = Dataset.from_dict(cells, features=features)
    names = {column: column for column in cells}
    assert standard(rows, names, "here").to_dict() == {
        "label": ["art", "sport"],
        "tokens": [["a"], ["b"]],
        "tags": [["B-PER"], ["O"]],
        "text": ["5", "6"],
    }


def test_columns_are_renamed_to_the_tasks_names_and_others_stay(tmp_path: Path) -> None:
    """Two columns can swap names; an unrelated column with a task's name is dropped."""
    file = written(tmp_path, "a.csv", "source,target,text,user\nx,y,z,Ada\n")
    swapped = rows_of(file, "source", "target", source_column="target", target_column="source")
    assert swapped[0] == {"source": "y", "target": "x", "text": "z", "user": "Ada"}
    assert rows_of(file, "text", text_column="source")[0] == {
        "text": "x",
        "target": "y",
        "user": "Ada",
    }


def test_a_field_of_a_column_can_be_used_as_a_column(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"translation": {"de": "Huhn", "en": "hen"}}\n')
    names = {"source_column": "translation.de", "target_column": "translation.en"}
    assert rows_of(file, "source", "target", **names)[0] == {"source": "Huhn", "target": "hen"}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl.gz"])
def test_a_changed_file_is_read_again(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is noticed even if size and time are equal; no cache folder is created."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for word in ("old", "new"):
        line = f'{{"text": "{word}"}}\n' if "json" in name else f"text\n{word}\n"
        file = written(tmp_path, name, line)
        os.utime(file, (1, 1))
        assert rows_of(file, "text")["text"][:] == [word]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.csv",
            "good film,1\nbad film,0\n",
            ["no column 'text', but 'good film', '1'", "for the run"],
        ),
        ("a.csv", "text,label\na,1\n,0\n", ["'text', row 2", "empty"]),
        ("a.csv", "text,label\na,1\nb\n", ["'label', row 2", "empty"]),
        ("a.csv", "text,label\na, b,1\n", ["row 1", "3 cells", "2"]),
        ("a.csv", "text,label\na,1\na, b,1\n", ["line 3", "saw 3"]),
        ("a.csv", "text,text\na,1\n", ["two columns", "'text'"]),
        ("a.csv", "text,label\n", ["no rows"]),
        ("a.csv", "", ["is empty"]),
        ("a.csv", b"text,label\na,1\n\xffb,0\n", ["a.csv:3", "not UTF-8", "0xff"]),
        ("a.csv.gz", b"text,label\na,1\n\xffb,0\n", ["a.csv.gz:3", "not UTF-8", "0xff"]),
        ("a.txt", "\n \n", ["no rows"]),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', ["'label', row 2", "empty"]),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n', ["2", "empty"]),
        ("a.jsonl", '{"text": ["a"], "label": 1}\n', ["'text', row 1", "a list, not a text"]),
        ("a.jsonl", '{"text": "a",\n', ["a.jsonl:1 cannot be read", "a list of objects"]),
        ("a.jsonl", '{"text": "a"}\n\n3\n', ["a.jsonl:3", "holds 3, not an object"]),
        ("a.json", '[{"text": "a"}, ["b"]]', ["holds ['b'], not an object"]),
        ("a.json", '[{"text": "a"}, {"text": 1}]', ["cannot be read", "a column one type"]),
        ("a.json", "", ["no rows"]),
    ],
)
def test_bad_files_are_one_line_errors(
    tmp_path: Path, name: str, content: str | bytes, words: list[str]
) -> None:
    """The error names the file, the place and what to change."""
    columns = ("text",) if name.endswith("txt") else ("text", "label")
    refused(written(tmp_path, name, content), columns, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"tokens": ["a", "b"], "ner_tags": ["O"]}\n', ["row 1 has 2 tokens and 1 tag; "]),
        ('{"tokens": [], "ner_tags": []}\n', ["'tokens', row 1", "empty"]),
        ('{"tokens": ["a", null], "ner_tags": ["O", "O"]}\n', ["'tokens', row 1", "empty"]),
        ('{"tokens": 3, "ner_tags": ["O"]}\n', ["'tokens', row 1", "not a list"]),
        ('{"tokens": ["a"], "ner_tags": ["PER"]}\n', ["row 1: tag 'PER' is not O, B-TYPE"]),
        (
            '{"tokens": ["a"], "ner_tags": ["O"]}\n{"tokens": ["a"], "ner_tags": ["I-PER"]}\n',
            ["row 2: tag 'I-PER' continues no entity", "IOB2", "begins with B-PER"],
        ),
        ("""{"tokens": "['a', 'b']", "ner_tags": "O O"}\n""", ["row 1", "printed list"]),
    ],
)
def test_bad_tags_are_one_line_errors(tmp_path: Path, content: str, words: list[str]) -> None:
    refused(written(tmp_path, "ner.jsonl", content), ("tokens", "tags"), words)


def refused(file: Path, columns: tuple[str, ...], words: list[str]) -> None:
    """Assert that reading ``file`` is a one-line error with ``words`` and the file's name."""
    with pytest.raises(DataError) as caught:
        rows_of(file, *columns)
    message = str(caught.value)
    assert all(word in message for word in [*words, file.name])
    assert "; " in message
    assert "\n" not in message


def test_a_truncated_gzip_file_and_a_missing_file_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(CSV.encode() * 99)[:-9])
    refused(tmp_path / "cut.csv.gz", ("text",), ["fetch the file again"])
    refused(tmp_path / "none.csv", ("text",), ["data.train_file", "no such file"])


def test_the_error_for_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    known = r"data.train_file=.*parquet: .*\.csv, \.tsv, \.json, \.jsonl, \.txt"
    with pytest.raises(ConfigError, match=known):
        rows_of(tmp_path / "a.parquet", "text")


def test_a_missing_split_is_a_tenth_of_the_training_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Splits are disjoint, drawn with the seed, in the file's order; a warning has their sizes."""
    numbers = [f"{number:03}" for number in range(95)]
    file = written(tmp_path, "a.txt", "\n".join(numbers))

    def texts(seed: int, **files: str) -> list[list[str]]:
        splits = read(DataSettings(train_file=str(file), **files), ["text"], seed)
        return [rows["text"][:] for rows in (splits.train, splits.validation, splits.test)]

    with caplog.at_level(logging.WARNING):
        found = texts(seed=1)
    assert [len(part) for part in found] == [77, 9, 9]
    assert sorted(chain(*found)) == numbers
    assert all(part == sorted(part) for part in found)
    assert "9 of 95 rows each become validation and test" in caplog.text
    assert texts(seed=1) == found != texts(seed=2)
    given = texts(seed=1, validation_file=str(file))
    assert given[1] == numbers
    assert sorted([*given[0], *given[2]]) == numbers
    few = written(tmp_path, "few.txt", "one\ntwo\n")
    with pytest.raises(DataError, match=r"too few rows \(2\) to take validation and test"):
        _ = read(DataSettings(train_file=str(few)), ["text"], 0).train


def test_each_split_is_read_only_when_it_is_used(tmp_path: Path) -> None:
    """A server that uses no training rows therefore needs no training file."""
    file = written(tmp_path, "a.txt", "one\ntwo\n")
    data = DataSettings(validation_file=str(file), test_file=str(file))
    splits = read(data, ["text"], 0)
    assert splits.validation["text"][:] == splits.test["text"][:] == ["one", "two"]
    with pytest.raises(DataError, match=r"data\.train_file is not set"):
        _ = splits.train
    absent = replace(data, train_file=str(tmp_path / "absent.txt"))
    assert len(read(absent, ["text"], 0).test) == 2


def opened(rows: Mapping[str, Dataset]) -> dict[str, Callable[[], Dataset]]:
    """A function for each split that returns its rows, as ``hub.load`` returns it."""
    return {name: partial(rows.__getitem__, name) for name in rows}


def hub(monkeypatch: pytest.MonkeyPatch, **splits: str) -> Splits:
    """The splits that are read from a fake hub dataset with these splits of ten rows each."""
    rows = {name: Dataset.from_dict({"text": [text] * 10}) for name, text in splits.items()}
    arguments = ("hf://datasets/owner/set", "owner/set", "plain")
    monkeypatch.setattr(hub_module, "load", lambda *name: {arguments: opened(rows)}[name])
    return read(DataSettings(name="owner/set", config="plain"), ["text"], 0)


@pytest.mark.parametrize("name", ["validation", "valid", "dev"])
def test_all_names_of_the_validation_split_on_the_hub_are_known(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    splits = hub(monkeypatch, train="a", test="c", **{name: "b"})
    found = [set(rows["text"]) for rows in (splits.train, splits.validation, splits.test)]
    assert found == [{"a"}, {"b"}, {"c"}]


def test_a_hub_dataset_may_lack_a_validation_but_not_a_training_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    splits = hub(monkeypatch, train="a", test="c")
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [9, 1, 10]
    with pytest.raises(DataError, match="owner/set: has no split train, only test, extra"):
        hub(monkeypatch, test="a", extra="b")


@pytest.mark.parametrize("named", [True, False])
def test_a_split_with_hidden_labels_is_replaced_for_tasks_with_labels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    """Tasks with labels get training rows instead; other tasks use the split's texts."""
    kind = ClassLabel(names=["no", "yes"]) if named else Value("int64")
    features = Features({"text": Value("string"), "label": kind})
    splits = {"train": [0, 1] * 10, "validation": [1, -1], "test": [-1] * 4}
    rows = {
        name: Dataset.from_dict({"text": ["a"] * len(ids), "label": ids}, features=features)
        for name, ids in splits.items()
    }
    monkeypatch.setattr(hub_module, "load", lambda *_: opened(rows))
    data = DataSettings(name="owner/set")
    assert len(read(data, ["text"], 0).test) == 4
    rows["validation"] = rows["validation"].select([0])
    with caplog.at_level(logging.WARNING):
        found = read(data, ["text", "label"], 0)
    assert [len(found.train), len(found.validation), len(found.test)] == [18, 1, 2]
    assert set(found.test["label"]) <= {"no", "yes", "0", "1"}
    assert "owner/set: test has no labels" in caplog.text
    assert "2 of 20 rows each become test" in caplog.text


def test_a_hidden_label_is_reported_with_its_row() -> None:
    labels = Features({"label": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"label": [1, -1]}, features=labels)
    with pytest.raises(DataError, match=r"set:test: column 'label', row 2: has no label \(-1\)"):
        standard(rows, {"label": "label"}, "set:test")


def test_the_error_for_a_hub_that_fails_names_the_option_for_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: str | None) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(hub_module, "hub_silence", lambda *_: "")
    monkeypatch.setattr(hub_module, "_check_card", fail)
    with pytest.raises(DataError) as caught:
        read(DataSettings(name="owner/set"), ["text"], 0)
    message = str(caught.value)
    assert all(word in message for word in ["owner/set", "no network", "data.train_file=FILE"])
    assert "\n" not in message


def test_progress_bars_are_disabled_only_while_reading(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets.enable_progress_bars()
    rows_of(written(tmp_path, "a.csv", CSV), "text")
    assert capfd.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()


def test_a_label_with_a_single_row_stays_in_the_training_split(tmp_path: Path) -> None:
    """This holds for every seed: a label without training rows cannot be learned."""
    lines = [f"text {n},{'rare' if n == 7 else 'common'}" for n in range(40)]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["text,label", *lines]) + "\n")
    for seed in range(8):
        splits = read(DataSettings(train_file=str(file)), ("text", "label"), seed)
        assert "rare" in splits.train["label"]
        assert len(splits.validation) == len(splits.test) == 4


def test_the_error_for_cells_separated_by_semicolons_asks_for_commas(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text;label\na;b\n")
    with pytest.raises(DataError, match="one column is 'text;label'; separate cells by commas"):
        _ = read(DataSettings(train_file=str(file)), ("text", "label"), 0).train
