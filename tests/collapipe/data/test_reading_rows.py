"""Unreadable columns are left out if they are not needed; an invalid needed cell is an error."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from collapipe.data.files import read_file
from collapipe.errors import DataError

_INVALID: dict[str, list[Any]] = {
    "types": [1, "a", 2],
    "size": [1, 2, 2**70],
    "half": ["a", "b\ud83d", "c"],
    "depth": [{"a": 1}, {"a": "b"}, None],
}


def _lines(path: Path, column: str, cells: list[Any], *, whole: bool = False) -> Path:
    rows = [{"text": f"t{number}", column: cell} for number, cell in enumerate(cells)]
    lines = [json.dumps(row) for row in rows]
    path.write_text(f"[{','.join(lines)}]" if whole else "\n".join(lines))
    return path


@pytest.mark.parametrize("column", list(_INVALID))
def test_an_unneeded_column_that_cannot_be_read_is_left_out(
    tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = _lines(tmp_path / "rows.jsonl", column, _INVALID[column])
    with caplog.at_level(logging.WARNING):
        assert read_file(path, "--file", ["text"])[:] == {"text": ["t0", "t1", "t2"]}
    (warning,) = caplog.messages
    assert f"column {column!r}" in warning and "left out" in warning and "\n" not in warning


@pytest.mark.parametrize(("column", "line"), [("types", 2), ("size", 3), ("half", 2), ("depth", 2)])
def test_an_invalid_cell_of_a_needed_column_is_reported_with_its_line(
    tmp_path: Path, column: str, line: int
) -> None:
    path = _lines(tmp_path / "rows.jsonl", column, _INVALID[column])
    needed = "depth.a" if column == "depth" else column
    with pytest.raises(DataError, match=rf"rows\.jsonl:{line}: column '{column}'") as caught:
        read_file(path, "--file", ["text", needed])
    assert "\n" not in str(caught.value)


def test_an_invalid_cell_of_a_json_list_is_reported_with_its_number(tmp_path: Path) -> None:
    path = _lines(tmp_path / "rows.json", "types", _INVALID["types"], whole=True)
    with pytest.raises(DataError, match=r"rows\.json: object 2: column 'types'"):
        read_file(path, "--file", ["types"])


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_cell_may_contain_a_long_text(tmp_path: Path, suffix: str) -> None:
    path, text = tmp_path / f"rows.{suffix}", "word " * 30_000
    separator = "," if suffix == "csv" else "\t"
    path.write_text(f"text{separator}label\n{text}{separator}a\nb{separator}c\n")
    assert read_file(path, "--file", ["text"])["text"][:] == [text, "b"]


def test_unclosed_brackets_are_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 200_000)
    with pytest.raises(DataError, match="cannot be read"):
        read_file(path, "--file", ["text"])
