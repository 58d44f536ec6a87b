"""The seam of a task. A user's own task is a frozen dataclass with these members, named by
``task._target_``; its fields are the options under ``task``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from datasets import Dataset

from collapipe.batch import Batch
from collapipe.tasks.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Splits:
    """A task's rows. ``train`` is cut into the units' shards, the others stay on the server."""

    train: Dataset
    validation: Dataset
    test: Dataset


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value and what it takes to compute it again."""

    name: str
    value: float
    signature: str


class Examples(Protocol):
    """Encoded rows that can be batched in any order."""

    def __len__(self) -> int:
        """Number of rows."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """Pad these rows to a common length."""


class Task(Protocol):
    """What is learned, from which rows, and how well."""

    @property
    def name(self) -> str:
        """As in ``task=NAME``."""

    @property
    def max_length(self) -> int:
        """Most tokens of an input, a target or a prediction."""

    def splits(self, seed: int) -> Splits:
        """All rows. Raises ``DataError`` that names file and line."""

    def train_tokenizer(self, rows: Dataset) -> Tokenizer:
        """A tokeniser for the task, a pure function of ``rows``."""

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Rows as token ids."""

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Batch:
        """What a user types, as a batch without targets."""

    def decode(self, predictions: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """What the model generated, as text."""

    def score(self, predictions: Sequence[str], rows: Dataset) -> Score:
        """The metric of decoded predictions for these rows."""
