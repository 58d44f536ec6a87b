"""The interface of a task.

A user's task is a frozen dataclass with these members, named by ``task._target_``. Its fields are
the options under ``task``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Protocol

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from pydantic import Field

from collapipe.data.folders import Splits
from collapipe.report import Score as Score  # for users' tasks
from collapipe.statistics import Statistics
from collapipe.tensors import Batch
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import MOST_LABELS

VocabularySize = Annotated[int, Field(ge=259)]  # 256 bytes and three special tokens
# At least one token and two special ones; attention over longer texts fits no device.
TextLength = Annotated[int, Field(ge=3, le=2**15)]
LabelCount = Annotated[int, Field(ge=2, le=MOST_LABELS)]


class Examples(Protocol):
    """Encoded rows that can be batched in any order."""

    @property
    def lengths(self) -> Sequence[int]:
        """Input tokens of each example; examples of similar length share a batch."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """Pad these examples to a common length."""

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Return the predictions for all examples as texts, in the examples' order."""


class Task(Protocol):
    """A task: its rows, how they are encoded, and its metric."""

    @property
    def name(self) -> str:
        """Name by which the option ``task`` selects it."""

    @property
    def max_length(self) -> int:
        """Largest number of tokens of an input, a target or a prediction."""

    @property
    def vocabulary(self) -> int:
        """Largest number of tokens of a tokeniser that the run trains."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of its rows; the option ``data.COLUMN_column`` names each in a user's files."""

    @property
    def heads(self) -> tuple[str, ...]:
        """Kinds of heads (``ModelSpec.head``) that can train on this task's targets."""

    @property
    def listed_labels(self) -> tuple[str, ...] | None:
        """Names of all possible labels, ordered by id; None: the labels of the training rows."""

    @property
    def max_labels(self) -> int:
        """Largest number of labels without a list; 0: the task predicts text."""

    def splits(self, seed: int) -> Splits:
        """Return all rows, if the user names none.

        Raises ``DataError``, which names file and line, for invalid rows.
        """

    def label_counts(self, rows: Dataset) -> Mapping[str, int]:
        """Return how often each label occurs in ``rows``; empty if the task predicts text."""

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        """Return each row's texts, on whose words the run can train a tokeniser."""

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Return rows as token ids; log how many were truncated to ``max_length``."""

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Encode rows as ``encode`` does, but each row independently of the others."""

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Examples:
        """Encode texts that a user types, without targets."""

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return the metric's counts for decoded predictions of these rows.

        Counts of disjoint sets of rows add up. ``labels`` are the run's labels, ordered by id.
        """

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """Whether the non-negative counts have a valid shape and are consistent.

        Then ``score`` can be computed from them.
        """

    def score(self, statistics: Statistics) -> Score:
        """Return the metric. Raises ``NonFiniteLossError`` if it overflows."""
