"""Common parts of tasks on texts: rows, truncation, labels, and special tokens around texts."""

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from torch import Tensor

from collapipe.data.folders import Parse, Splits, read_lines, read_splits
from collapipe.errors import ConfigError, DataError
from collapipe.tasks.task import Examples, LabelCount, TextLength, VocabularySize
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.vocabulary import MOST_LABELS, fault_of_label

_log = logging.getLogger(__name__)
_SHOWN = 6  # names in a message
TRUNCATED = "%d of %d %s are longer than task.max_length=%d and were truncated"


class TextTask:
    """The base of a task; its subclass is a dataclass with these fields and more."""

    __slots__ = ()
    vocabulary: VocabularySize  # largest number of tokens of a tokeniser that the run trains
    max_length: TextLength  # tokens of a text, with special tokens; longer texts are truncated
    columns: ClassVar[tuple[str, ...]]  # of the rows; the first holds texts
    heads: ClassVar[tuple[str, ...]]

    @property
    def listed_labels(self) -> tuple[str, ...] | None:
        """None; tasks with labels derive from ``LabelledTask``."""
        return None

    @property
    def max_labels(self) -> int:
        """0: the task predicts text."""
        return 0

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        """Return no counts: the task predicts text."""
        return {}

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        return ([text] for text in rows[self.columns[0]])

    @abstractmethod
    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Return rows as token ids."""

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Examples:
        """Encode rows as ``encode`` does, because each row is a separate example."""
        return self.encode(rows, tokenizer)

    def truncated(
        self, ids: Sequence[Sequence[int]], special_tokens: int, what: str = "texts"
    ) -> list[Sequence[int]]:
        """Cut each text to the maximum length minus ``special_tokens``; log how many were cut."""
        room = self.max_length - special_tokens
        if longer := sum(len(row) > room for row in ids):
            _log.warning(TRUNCATED, longer, len(ids), what, self.max_length)
        return [row[:room] for row in ids]


@dataclass(frozen=True, slots=True)
class FolderTask(TextTask):
    """A task whose rows are read from a folder, or synthetic."""

    # folder with ``{train,valid,test}.SUFFIX``, plain or .gz, of lines that ``parse`` reads
    root: str | None
    synthetic: bool  # whether rows come from ``made_up``, a function of the seed
    vocabulary: VocabularySize
    max_length: TextLength

    name: ClassVar[str]
    suffix: ClassVar[str]
    parse: ClassVar[Parse]
    made_up: ClassVar[Callable[[int], Splits]]

    def splits(self, seed: int) -> Splits:
        """Return the folder's rows in its order, or synthetic rows.

        Raises ``DataError`` with file and line, and ``ConfigError`` if no rows are configured.
        """
        if self.synthetic:
            return type(self).made_up(seed)
        if self.root is None:
            raise ConfigError(
                f"task {self.name}: no rows; set data.root=FOLDER, data.train_file=FILE, "
                "data.name=HUB_NAME or data=synthetic"
            )
        return read_splits(self.name, self.root, self._read)

    def _read(self, folder: Path, split: str) -> Dataset:
        file = read_lines(folder, f"{split}.{self.suffix}")
        if rows := type(self).parse(file):
            return Dataset.from_list(rows)
        raise DataError(f"{file.path} holds no rows; add one, or set data.root")


@dataclass(frozen=True, slots=True)
class LabelledTask(FolderTask):
    """A task that predicts labels."""

    labels: tuple[str, ...] | None = None  # all possible ones; None: those of the training rows
    max_labels: LabelCount = 256  # of all units together, without a list

    def __post_init__(self) -> None:
        names = self.labels or ()
        if self.labels is not None and (len(set(names)) < max(2, len(names)) or not all(names)):
            raise ConfigError(
                f"task.labels={[*names]}: must be two or more different names; correct them, or "
                "set null for those that rows have"
            )
        if fault := next(filter(None, map(fault_of_label, names)), None):
            raise ConfigError(f"task.labels: {fault}")

    @property
    def listed_labels(self) -> tuple[str, ...] | None:
        """``labels`` ordered by id, independent of the order of the list.

        So ids are the same as without a list if every label occurs in a row.
        """
        return None if self.labels is None else in_order(self.labels)


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Token ids of texts, without special tokens, and each text's label ids (empty if unknown)."""

    texts: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each text with BOS and EOS."""
        return [len(ids) + 2 for ids in self.texts]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return a padded batch: texts between BOS and EOS, and their ``targets``."""
        vocabulary = self.tokenizer.vocabulary
        texts = [[vocabulary.bos, *self.texts[row], vocabulary.eos] for row in rows]
        targets = padded([self.targets(row) for row in rows], IGNORED)
        return Batch(padded(texts, vocabulary.pad), mask_of(texts), targets)

    def targets(self, row: int) -> Sequence[int]:
        """Return the target ids of one text."""
        return self.labels[row]

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        return [self.tokenizer.labels[label] for (label,) in predictions]

    def scores(self, row: int, probabilities: Tensor) -> dict[str, Any]:
        """Return the largest probability, and all ``probabilities`` [labels] by label."""
        each = self.by_name(probabilities)
        return {"probability": max(each.values()), "probabilities": each}

    def by_name(self, probabilities: Tensor) -> dict[str, float]:
        """Return label → probability, given ``probabilities`` [labels]."""
        return dict(zip(self.tokenizer.labels, probabilities.tolist(), strict=True))


def count_labels(names: Iterable[str]) -> dict[str, int]:
    """Count each name; the result is in the order of the labels' ids."""
    counts = Counter(names)
    return {name: counts[name] for name in in_order(counts)}


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Return labels in the order of their ids: sorted, by value if all are whole numbers.

    The order does not depend on the order or source of the rows, so equal rows give equal ids.
    """
    numeric = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numeric else 0, name)))


def encode_labels(rows: Iterable[Sequence[str]], labels: Sequence[str]) -> list[list[int]]:
    """Return the ids of each row's labels. Raises ``DataError`` for an unknown label."""
    ids = {name: number for number, name in enumerate(labels)}
    encoded = []
    for row, names in enumerate(rows, 1):
        if unknown := [name for name in names if name not in ids]:
            raise DataError(
                f"row {row}: label {unknown[0]!r} is not one of the run's ({_first(labels)}), from "
                "task.labels or else from training rows; leave the row out, or train on rows that "
                "have the label",
                "its rows have a label that the run does not know",
            )
        encoded.append([ids[name] for name in names])
    return encoded


def check_labels(names: Collection[str], listed: Sequence[str] | None) -> None:
    """Raise ``DataError`` if training rows have an unlisted label or too many different labels."""
    if len(names) > MOST_LABELS:
        raise DataError(
            f"training rows have {len(names):,} different labels, at most {MOST_LABELS:,} are "
            "possible; choose another column",
            "its rows have too many different labels",
        )
    for name in names:
        if listed is not None and name not in listed:
            raise DataError(
                f"training rows have the label {name!r}, which task.labels does not list "
                f"({_first(listed)}); list it, or leave these rows out",
                "its rows have a label that task.labels does not list",
            )


def _first(labels: Sequence[str]) -> str:
    return ", ".join([*labels[:_SHOWN], *(["…"] if len(labels) > _SHOWN else [])])
