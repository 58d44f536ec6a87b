"""The seam of a task. A user's own task is a frozen dataclass with these members, named by
``task._target_``; its fields are the options under ``task``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Protocol

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from pydantic import Field

from collapipe.batch import Batch
from collapipe.data.folders import Splits
from collapipe.report import Score as Score  # what a user's task returns
from collapipe.statistics import Statistics
from collapipe.text.labels import MOST_LABELS
from collapipe.text.tokenizer import Tokenizer

VocabularySize = Annotated[int, Field(ge=259)]  # one for each of 256 bytes, three special tokens
# With fewer there is no token beside two special ones; attention over more fits no device.
TextLength = Annotated[int, Field(ge=3, le=2**15)]
LabelCount = Annotated[int, Field(ge=2, le=MOST_LABELS)]
MAX_LABELS = 256  # of older runs


class Examples(Protocol):
    """Encoded rows that can be batched in any order."""

    @property
    def lengths(self) -> Sequence[int]:
        """Input tokens of each example; examples of similar length share a batch."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """Pad these examples to a common length."""

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """What the model predicted for all examples, in their order, as text."""


class Task(Protocol):
    """What is learned, from which rows, and how well."""

    @property
    def name(self) -> str:
        """The option ``task`` selects it by this name."""

    @property
    def max_length(self) -> int:
        """Most tokens of an input, a target or a prediction."""

    @property
    def vocabulary(self) -> int:
        """Tokens known to a tokeniser of the run's own, at most."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of its rows; option ``data.COLUMN_column`` names each in a user's own files."""

    @property
    def heads(self) -> tuple[str, ...]:
        """Kinds of heads (``ModelSpec.head``) that can train on this task's targets."""

    @property
    def listed_labels(self) -> tuple[str, ...] | None:
        """Names of all labels that rows may have, in the order of their ids; None: those that
        training rows have."""

    @property
    def max_labels(self) -> int:
        """How many labels all training rows may have together without a list; 0: the task predicts
        text."""

    def splits(self, seed: int) -> Splits:
        """All rows, where the user brings none. Raises ``DataError`` that names file and line."""

    def label_counts(self, rows: Dataset) -> Mapping[str, int]:
        """How often each label stands in ``rows``; empty where the task predicts text."""

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        """Each row's texts, whose words a tokeniser of the run's own is made of."""

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Rows as token ids; says in the log how many were truncated to ``max_length``."""

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """As ``encode``, but what becomes of a row does not depend on the others."""

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Examples:
        """What a user types, without targets."""

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return the metric's counts for decoded predictions of these rows.

        Counts of disjoint sets of rows add up. ``labels`` are the run's labels, ordered by id.
        """

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """Whether some rows can have these ``counts``, which are not negative, in shape and in how
        they hang together: then ``score`` can be computed from them."""

    def score(self, statistics: Statistics) -> Score:
        """Return the metric. Raises ``NonFiniteLossError`` if it overflows."""
