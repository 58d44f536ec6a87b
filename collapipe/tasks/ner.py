"""Named-entity recognition: sentences whose words have tags, F1 over whole entities."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from typing import Any

from datasets import Dataset
from seqeval.metrics.v1 import precision_recall_fscore_support
from seqeval.scheme import IOB2
from torch import Tensor

from collapipe.batch import IGNORED, Batch
from collapipe.data.folders import OUTSIDE, parse_tagged
from collapipe.tasks.synthetic import entities
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import OwnRows, TextTask
from collapipe.text.labels import count_labels, find_label, label_ids
from collapipe.text.padding import mask_of, padded, truncate
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TaggedSentences:
    """Token ids of sentences, without marks, and what each sentence's words became.

    Attributes
    ----------
    sentences
        Token ids of each sentence.
    starts
        Place of each word's first token; None for a word that made no token or was cut off.
    tags
        Id of each word's tag; none where they are unknown.
    """

    sentences: Sequence[Sequence[int]]
    starts: Sequence[Sequence[int | None]]
    tags: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sentence with both marks."""
        return [len(ids) + 2 for ids in self.sentences]

    def batch(self, rows: Sequence[int]) -> Batch:
        """A sentence stands between BOS and EOS; a word's tag is the target of its first token."""
        marks = self.tokenizer.vocabulary
        sentences = [[marks.bos, *self.sentences[row], marks.eos] for row in rows]
        targets = padded([self._targets(row) for row in rows], IGNORED)
        return Batch(padded(sentences, marks.pad), mask_of(sentences), targets)

    def _targets(self, row: int) -> list[int]:
        targets = [IGNORED] * (len(self.sentences[row]) + 2)
        for start, tag in zip(self.starts[row], self.tags[row], strict=bool(self.tags[row])):
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
            {OUTSIDE: 1.0}
            if start is None
            else dict(zip(self.tokenizer.labels, probabilities[start + 1].tolist(), strict=True))
            for start in self.starts[row]
        ]
        return {"probability": [max(each.values()) for each in words], "probabilities": words}


@dataclass(frozen=True, slots=True)
class NamedEntities(TextTask):
    """Rows have the columns ``tokens``, words or characters, and ``tags``, IOB2, one for each.

    A line of the folder's .conll files is ``word tag``, a blank one stands between sentences.
    """

    name = "ner"
    columns = ("tokens", "tags")
    heads = ("tokens",)
    own_rows = OwnRows("conll", parse_tagged, entities)

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        """Words of each tag, see ``count_labels``."""
        return count_labels(chain.from_iterable(rows["tags"]))

    def train_tokenizer(self, rows: Dataset) -> Tokenizer:
        """Byte-level BPE that merges nothing across words."""
        return Tokenizer.train(chain.from_iterable(rows["tokens"]), self.vocabulary)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> TaggedSentences:
        """Words and tags as ids. Raises ``DataError`` for a tag without one."""
        ids = label_ids(tokenizer.labels)
        tags = [[find_label(t, ids, row) for t in tags] for row, tags in enumerate(rows["tags"], 1)]
        return self._examples(rows["tokens"], tags, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> TaggedSentences:
        """Sentences with blanks between words; one without any is taken character by character."""
        words = [text.split() if " " in text.strip() else list(text.strip()) for text in texts]
        return self._examples(words, [[] for _ in words], tokenizer)

    def score(self, predictions: Sequence[str], rows: Dataset, loss: float) -> Score:
        """seqeval's strict F1, precision and recall over all entities, of whole sentences: what
        was cut off counts as O."""
        precision, recall, f1, _ = precision_recall_fscore_support(  # seqeval's mode="strict"
            list(rows["tags"]),
            [tags.split() for tags in predictions],
            average="micro",
            scheme=IOB2,
            zero_division=0,
        )
        signature = (
            f"seqeval {version('seqeval')}:mode=strict:scheme=IOB2:average=micro:rows={len(rows)}"
        )
        extra_metrics = {"precision": round(float(precision), 6), "recall": round(float(recall), 6)}
        return Score("strict F1", round(float(f1), 6), signature, extra_metrics)

    def _examples(
        self,
        words: Sequence[Sequence[str]],
        tags: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
    ) -> TaggedSentences:
        pieces, room = tokenizer.encode_words(words), self.max_length - 2
        whole = [list(chain.from_iterable(row)) for row in pieces]
        sentences = truncate(whole, room, self.max_length, "sentences")
        return TaggedSentences(sentences, [_starts(row, room) for row in pieces], tags, tokenizer)


def _starts(words: Sequence[Sequence[int]], room: int) -> list[int | None]:
    starts: list[int | None] = []
    place = 0
    for ids in words:
        starts.append(place if ids and place < room else None)
        place += len(ids)
    return starts
