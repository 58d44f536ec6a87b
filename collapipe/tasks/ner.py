"""Named-entity recognition: sentences with one tag per word; metric: F1 over whole entities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate, chain
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from collapipe.data.folders import OUTSIDE, fault_of, parse_tagged
from collapipe.errors import ConfigError
from collapipe.statistics import Statistics
from collapipe.tasks.synthetic import entities
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import LabelledTask, LabelledTexts, count_labels, encode_labels
from collapipe.tensors import IGNORED
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TaggedSentences(LabelledTexts):
    """Sentences with a tag id per word, and the place of each word's first token.

    The place is None for a word that has no token or was truncated.
    """

    starts: Sequence[Sequence[int | None]]

    def targets(self, row: int) -> list[int]:
        """Return the targets of a sentence: a word's tag is the target of its first token."""
        targets = [IGNORED] * (len(self.texts[row]) + 2)
        for start, tag in zip(self.starts[row], self.labels[row], strict=bool(self.labels[row])):
            if start is not None:
                targets[start + 1] = tag  # after BOS
        return targets

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Return each sentence's tags joined by blanks; O for a word without a token."""
        names = self.tokenizer.labels
        return [
            " ".join(OUTSIDE if start is None else names[tags[start + 1]] for start in starts)
            for starts, tags in zip(self.starts, predictions, strict=True)
        ]

    def scores(self, row: int, probabilities: Tensor) -> dict[str, Any]:
        """Return each word's tag probabilities, given ``probabilities`` [tokens, tags].

        A word without a token has O with probability 1.
        """
        words = [
            {OUTSIDE: 1.0} if start is None else self.by_name(probabilities[start + 1])
            for start in self.starts[row]
        ]
        return {"probability": [max(each.values()) for each in words], "probabilities": words}


@dataclass(frozen=True, slots=True)
class NamedEntities(LabelledTask):
    """Named-entity recognition; rows have ``tokens`` (words or characters) and IOB2 ``tags``.

    A line of the folder's files is ``word tag``; blank lines separate sentences.
    """

    name = "ner"
    columns = ("tokens", "tags")
    heads = ("tokens",)
    suffix, parse, made_up = "conll", parse_tagged, entities

    def __post_init__(self) -> None:
        LabelledTask.__post_init__(self)
        for tag in self.labels or ():
            if fault := fault_of(tag, tag.replace("I-", "B-", 1)):
                raise ConfigError(f"task.labels: {fault}")

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        return count_labels(chain.from_iterable(rows["tags"]))

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        """Return one text per word, so that the tokeniser merges nothing across words."""
        tokens: Iterable[Iterable[str]] = rows["tokens"]
        return tokens

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> TaggedSentences:
        """Return words and tags as ids. Raises ``DataError`` for an unknown tag."""
        return self._examples(
            rows["tokens"], encode_labels(rows["tags"], tokenizer.labels), tokenizer
        )

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> TaggedSentences:
        """Split sentences at blanks into words; without blanks, each character is a word."""
        words = [text.split() if " " in text.strip() else list(text.strip()) for text in texts]
        return self._examples(words, [[] for _ in words], tokenizer)

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return the numbers of correct, predicted and true entities, int64 [3].

        Tags are read as in seqeval's mode ``strict``. Truncated words count as O.
        """
        from seqeval.scheme import IOB2, Entities  # imports SciPy, which training does not need

        found, there = (
            [entity.to_tuple() for sentence in Entities(tags, IOB2).entities for entity in sentence]
            for tags in ([tags.split() for tags in predictions], list(rows["tags"]))
        )
        return np.array([len({*found} & {*there}), len(found), len(there)])

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """Whether there are at most as many correct entities as predicted and true ones."""
        counts = statistics.counts
        return counts.shape == (3,) and bool(counts[0] <= counts[1:].min())

    def score(self, statistics: Statistics) -> Score:
        """Return F1, precision and recall over all entities; 0 for a division by 0."""
        right, found, there = map(float, statistics.counts)
        precision, recall = right / (found or 1), right / (there or 1)
        f1 = 2 * precision * recall / (precision + recall or 1)
        signature = f"seqeval {version('seqeval')}:mode=strict:scheme=IOB2:average=micro"
        extra_metrics = {"precision": round(precision, 6), "recall": round(recall, 6)}
        return Score(
            "strict F1", round(f1, 6), f"{signature}:rows={statistics.rows}", extra_metrics
        )

    def _examples(
        self, words: Sequence[Sequence[str]], tags: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> TaggedSentences:
        pieces = tokenizer.encode_words(words)
        whole = [list(chain.from_iterable(row)) for row in pieces]
        starts = [self._starts(row) for row in pieces]
        return TaggedSentences(self.truncated(whole, 2, "sentences"), tags, tokenizer, starts)

    def _starts(self, words: Sequence[Sequence[int]]) -> list[int | None]:
        places = accumulate(map(len, words), initial=0)
        room = self.max_length - 2
        return [
            place if ids and place < room else None
            for ids, place in zip(words, places, strict=False)
        ]
