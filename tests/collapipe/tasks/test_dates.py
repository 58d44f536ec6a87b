"""The built-in task has unique rows that depend on the seed, with equal dates on both sides."""

from dataclasses import asdict
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trained import trained

from collapipe.errors import ConfigError
from collapipe.tasks.dates import Dates
from collapipe.tasks.task import Task
from collapipe.validation import typed

MONTHS = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
WEEKDAYS = "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"


def dates(train: int = 40, validation: int = 5, test: int = 7) -> Dates:
    """A small task."""
    return Dates(512, 64, train, validation, test)


def from_german(text: str) -> datetime:
    """Read a date without Babel, for comparison."""
    weekday, day, month, year, clock = text.replace(",", "").split()
    number = MONTHS.split().index(month) + 1
    moment = datetime.strptime(f"{year} {number} {day} {clock}", "%Y %m %d. %H:%M")
    assert WEEKDAYS.split()[moment.weekday()] == weekday
    return moment


@given(st.integers(0, 2**40))
def test_both_sides_mean_the_same_minute(seed: int) -> None:
    """Each side is parsed separately; the English side has the words of the C locale."""
    for row in dates().splits(seed).train:
        english = datetime.strptime(row["target"], "%A, %B %d, %Y, %I:%M %p")
        assert from_german(row["source"]) == english
        assert row["target"].isascii()


def test_splits_share_no_row() -> None:
    """No row occurs twice in one split or in two, and the splits have the requested sizes."""
    task = dates(3000, 200, 500)
    splits = task.splits(3)
    sources = [set(rows["source"]) for rows in (splits.train, splits.validation, splits.test)]
    assert [len(side) for side in sources] == [3000, 200, 500]
    assert len(set.union(*sources)) == 3700


def test_rows_depend_on_the_seed_alone() -> None:
    """Two calls with the same seed agree; two seeds give different rows."""
    first, again, other = (dates().splits(seed).train.to_dict() for seed in (1, 1, 2))
    assert first == again != other


def test_tokenized_dates_fit() -> None:
    """All rows are much shorter than ``max_length``, and decoding restores their texts."""
    task: Task = dates(2000)
    rows = task.splits(0).train
    tokenizer = trained(task, rows)
    pairs = task.encode(rows, tokenizer)
    batch = pairs.batch(range(len(pairs.lengths)))
    assert batch.inputs.shape[1] <= 24
    assert pairs.decode(tokenizer.encode(rows["target"])) == list(rows["target"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_rows", 0),
        ("validation_rows", -1),
        ("test_rows", 0),
        ("train_rows", 10**9),
        ("vocabulary", 100),
        ("max_length", 2),
    ],
)
def test_bad_fields_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{field}\b"):
        typed("task", Dates, {**asdict(dates()), field: value})
