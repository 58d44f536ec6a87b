"""Translation of German dates and times to English: a task without files and network."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import numpy as np
from babel.dates import format_date, format_time
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.data.folders import Splits
from collapipe.errors import ConfigError
from collapipe.sections import Count
from collapipe.seeds import derive
from collapipe.tasks.translation import Translation

START, END = datetime(1950, 1, 1), datetime(2050, 1, 1)
NUM_MINUTES = (END - START) // timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Dates(Translation):
    """Minutes drawn from ``START`` to ``END``, formatted with Babel's locale data.

    No minute is drawn twice, so no row is in two splits.
    """

    train_rows: Count
    validation_rows: Count
    test_rows: Count

    name = "dates"

    def __post_init__(self) -> None:
        if self._num_rows > NUM_MINUTES:
            raise ConfigError(
                f"task.train_rows, validation_rows and test_rows add up to {self._num_rows}; "
                f"keep them below {NUM_MINUTES}, the minutes of {START.year} to {END.year - 1}"
            )

    @property
    def _num_rows(self) -> int:
        return self.train_rows + self.validation_rows + self.test_rows

    def splits(self, seed: int) -> Splits:
        """Return splits without common rows; equal seeds give equal rows."""
        minutes = _minutes(self._num_rows, seed)
        bounds = self.train_rows, self.train_rows + self.validation_rows
        return Splits(*(partial(_rows, part.tolist()) for part in np.split(minutes, bounds)))


def draw(num_rows: int, seed: int) -> Dataset:
    """Return ``num_rows`` different rows; equal seeds give equal rows."""
    return _rows(_minutes(num_rows, seed).tolist())


def _minutes(count: int, seed: int) -> NDArray[np.int64]:
    random = np.random.default_rng(derive(seed, "dates"))
    return random.choice(NUM_MINUTES, count, replace=False)


def _rows(minutes: Iterable[int]) -> Dataset:
    moments = [START + timedelta(minutes=minute) for minute in minutes]
    columns = {"source": "de", "target": "en_US"}
    return Dataset.from_dict(
        {column: [_text(m, locale) for m in moments] for column, locale in columns.items()}
    )


def _text(moment: datetime, locale: str) -> str:
    date = format_date(moment, "full", locale=locale)
    time = format_time(moment, "short", locale=locale)
    return " ".join(f"{date}, {time}".split())  # CLDR's narrow blank before PM is hard to type
