"""Figures on the pages match the files that the pages name.

A table below ``<!-- figures: FILE -->`` has rows and columns of the file. Below ``<!-- numbers:
FILE … -->``, all numbers of a statement (a cell, or its part up to ``;``) are in one row of one
file, or in the file's fields for all rows.

Below ``<!-- claims -->``, a row's file is its last link or a named file of results; ``<!-- claims:
FILE -->`` names the file of all rows. Each ``mean (low … high)`` is a claim or a finding of the
file, and a verdict is the claim's verdict.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
_MARK = re.compile(r"^<!-- (figures|numbers|claims):? ?(.*?) ?-->\n((?:\|.*\n)+)", re.MULTILINE)
_NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?")
_INTERVAL = re.compile(r"([−\d.]+)(?: %[^(|\d]*)? \(([−\d.]+) … ([−\d.]+)\)")
_ENDS = "mean", "low", "high"

Table = list[list[str]]


def tables(kind: str) -> Iterator[Any]:
    """Yield the marked tables of a kind: page, files, and cells of head and rows."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, mark in enumerate(_MARK.finditer(page.read_text())):
            rows = [[c.strip() for c in row.strip("|").split("|")] for row in mark[3].splitlines()]
            if mark[1] == kind:
                table = [rows[0], *rows[2:]]
                yield pytest.param(page, mark[2].split(), table, id=f"{page.stem}-{number}")


@pytest.mark.parametrize(("page", "files", "table"), [*tables("figures")])
def test_rows_of_a_table_are_rows_of_the_file(page: Path, files: list[str], table: Table) -> None:
    (file,) = files
    found = json.loads((ROOT / file).read_text())
    head, *rows = table
    places = [0, *(found["columns"].index(name) for name in head[1:])]
    assert [
        row for row in rows if row not in [[each[i] for i in places] for each in found["rows"]]
    ] == []


@pytest.mark.parametrize(("page", "files", "table"), [*tables("numbers")])
def test_numbers_of_a_statement_are_in_one_row_of_a_file(
    page: Path, files: list[str], table: Table
) -> None:
    known = [numbers for file in files for numbers in numbers_of_rows(ROOT / file)]
    statements = [each for row in table[1:] for cell in row for each in cell.split(";")]
    assert [
        each
        for each in statements
        if not any({*_NUMBER.findall(each)} <= numbers for numbers in known)
    ] == []


def numbers_of_rows(file: Path) -> Iterator[set[str]]:
    """Yield the numbers of each row, together with all numbers of the file's other fields."""
    found = json.loads(file.read_text())
    rows = found.pop("rows")
    for row in rows:
        yield {*_NUMBER.findall(json.dumps([row, found], ensure_ascii=False))}


@pytest.mark.parametrize(("page", "files", "table"), [*tables("claims")])
def test_claims_match_their_files(page: Path, files: list[str], table: Table) -> None:
    head, *rows = table
    for row in rows:
        (file,) = files or re.findall(r"[(`](\S+\.json)[)`]", row[-1])
        entries = claims((RESULTS if "`" in row[-1] else page.parent) / file)
        for mean, low, high in _INTERVAL.findall("|".join(row)):
            shown = [each for each in entries if all(map(rounds_to, ends(each), (mean, low, high)))]
            assert shown, (row, mean)
            if "verdict" in head:
                (agrees,) = {each["agrees"] for each in shown if "agrees" in each}
                assert row[head.index("verdict")] == ("agrees" if agrees else "differs"), row


def claims(file: Path) -> list[dict[str, Any]]:
    """Return the claims and findings of a figure, or the cells with a verdict in a file of
    results."""
    found = json.loads(file.read_text())
    if "rows" not in found:
        return [*found["claims"], *found["findings"]]
    text = "|".join(cell for row in found["rows"] for cell in row)
    cells = re.findall(rf"{_INTERVAL.pattern} (no|\*\*yes)", text)
    return [
        {"ours": dict(zip(_ENDS, map(as_number, parts), strict=True)), "agrees": verdict != "no"}
        for *parts, verdict in cells
    ]


def as_number(text: str) -> float:
    """Return the number that a page shows."""
    return float(text.replace("−", "-"))


def ends(entry: dict[str, Any]) -> tuple[float | None, ...]:
    """Return mean, lower and upper end of a claim or a finding."""
    return tuple(entry["ours"][name] for name in _ENDS)


def rounds_to(number: float | None, text: str) -> bool:
    """Return whether a page shows the number, up to the shown digits."""
    digits = len(text.partition(".")[2])
    return number is not None and abs(number - as_number(text)) <= 0.51 * 10**-digits


FIELDS = {"command", "machine", "load", "seeds", "commit", "columns", "rows"}


def test_a_new_record_states_how_it_was_measured() -> None:
    found = json.loads(json.dumps(record("quiet", range(2), ("side", "s"), [("ours", "1.5")])))
    assert {*found} == FIELDS | {"date"}
    assert found["load"].startswith("quiet; ")
    assert re.fullmatch("[0-9a-f]{8,}|unknown", found["commit"])
    assert (found["seeds"], found["columns"]) == ([0, 1], ["side", "s"])
    assert found["rows"] == [["ours", "1.5"]]


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_result_states_how_it_was_measured(file: Path) -> None:
    found = json.loads(file.read_text())
    assert {*found} >= FIELDS
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}
