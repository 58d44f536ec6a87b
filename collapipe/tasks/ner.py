"""Named-entity recognition: sentences whose words have tags, F1 over whole entities."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate, chain
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from collapipe.batch import IGNORED
from collapipe.data.folders import OUTSIDE, fault_of, parse_tagged
from collapipe.errors import ConfigError
from collapipe.statistics import Statistics
from collapipe.tasks.synthetic import entities
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import LabelledTask, LabelledTexts, count_labels, encode_labels
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TaggedSentences(LabelledTexts):
    """Sentences, an id of a tag for each word, and the place of each word's first token: None for
    a word that made no token or was truncated."""

    starts: Sequence[Sequence[int | None]]

    def targets(self, row: int) -> list[int]:
        """A word's tag is the target of its first token."""
        targets = [IGNORED] * (len(self.texts[row]) + 2)
        for start, tag in zip(self.starts[row], self.labels[row], strict=bool(self.labels[row])):
            if start is not None:
                targets[start + 1] = tag  # behind BOS
        return targets

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Each sentence's tags, joined by blanks, one a word; O for a word without a token."""
        names = self.tokenizer.labels
        return [
            " ".join(OUTSIDE if start is None else names[tags[start + 1]] for start in starts)
            for starts, tags in zip(self.starts, predictions, strict=True)
        ]

    def scores(self, row: int, probabilities: Tensor) -> dict[str, Any]:
        """Of each word's tags, of ``probabilities`` [tokens, tags]; a word without a token is
        certainly O."""
        words = [
            {OUTSIDE: 1.0} if start is None else self.by_name(probabilities[start + 1])
            for start in self.starts[row]
        ]
        return {"probability": [max(each.values()) for each in words], "probabilities": words}


@dataclass(frozen=True, slots=True)
class NamedEntities(LabelledTask):
    """Rows have the columns ``tokens``, words or characters, and ``tags``, IOB2, one for each.

    A line of the folder's files is ``word tag``, a blank one stands between sentences.
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
        """A text a word, so that nothing is merged across words."""
        tokens: Iterable[Iterable[str]] = rows["tokens"]
        return tokens

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> TaggedSentences:
        """Words and tags as ids. Raises ``DataError`` for a tag without one."""
        return self._examples(
            rows["tokens"], encode_labels(rows["tags"], tokenizer.labels), tokenizer
        )

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> TaggedSentences:
        """Sentences with blanks between words; one without any is taken character by character."""
        words = [text.split() if " " in text.strip() else list(text.strip()) for text in texts]
        return self._examples(words, [[] for _ in words], tokenizer)

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Entities that are found and right, found, and there, as seqeval's mode ``strict`` reads
        tags; of whole sentences: a truncated word counts as O."""
        from seqeval.scheme import IOB2, Entities  # brings SciPy: who only trains does without

        found, there = (
            [entity.to_tuple() for sentence in Entities(tags, IOB2).entities for entity in sentence]
            for tags in ([tags.split() for tags in predictions], list(rows["tags"]))
        )
        return np.array([len({*found} & {*there}), len(found), len(there)])

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """What is right was found, and is there."""
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
