"""Named-entity recognition: sentences whose words have tags, F1 over whole entities."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain

from datasets import Dataset
from seqeval.metrics.v1 import precision_recall_fscore_support
from seqeval.scheme import IOB2

from collapipe.batch import IGNORED, Batch
from collapipe.data.split_files import read_splits
from collapipe.data.tag_files import OUTSIDE, parse_tagged
from collapipe.tasks.labels import count_labels, find_label, label_ids
from collapipe.tasks.limits import require_at_least
from collapipe.tasks.padding import cut, mask_of, padded
from collapipe.tasks.synthetic import entities
from collapipe.tasks.task import Score, Splits
from collapipe.tasks.tokenizer import Tokenizer


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


@dataclass(frozen=True, slots=True)
class NamedEntities:
    """Rows have the columns ``tokens``, words or characters, and ``tags``, IOB2, one for each.

    Attributes
    ----------
    root
        Folder with ``{train,valid,test}.conll``, plain or .gz: ``word tag`` a line, a blank line
        between sentences.
    synthetic
        Made-up rows.
    vocabulary
        Tokens known to a tokeniser of the task's own, at most.
    max_length
        Tokens of a sentence, including two marks; what is longer is cut.
    """

    root: str | None
    synthetic: bool
    vocabulary: int
    max_length: int

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` where no tokeniser or no sentence could come of the fields."""
        require_at_least(self, "vocabulary", 259, "a token for each of 256 bytes and 3 marks")
        require_at_least(self, "max_length", 3, "one token and two marks")

    @property
    def name(self) -> str:
        """As in ``task=NAME``."""
        return "ner"

    @property
    def columns(self) -> tuple[str, ...]:
        """A sentence's words and their tags."""
        return ("tokens", "tags")

    @property
    def heads(self) -> tuple[str, ...]:
        """See ``Task``."""
        return ("tokens",)

    def splits(self, seed: int) -> Splits:
        """Rows of the folder in its order, or made-up ones, a function of the seed.

        Raises ``DataError`` that names file and line, ``ConfigError`` where there is neither.
        """
        if self.synthetic:
            return entities(seed)
        return read_splits(self.name, self.root, "conll", parse_tagged)

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
        beside = {"precision": round(float(precision), 6), "recall": round(float(recall), 6)}
        return Score("strict F1", round(float(f1), 6), signature, beside)

    def _examples(
        self,
        words: Sequence[Sequence[str]],
        tags: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
    ) -> TaggedSentences:
        pieces, room = tokenizer.encode_words(words), self.max_length - 2
        whole = [list(chain.from_iterable(row)) for row in pieces]
        sentences = cut(whole, room, self.max_length, "sentences")
        return TaggedSentences(sentences, [_starts(row, room) for row in pieces], tags, tokenizer)


def _starts(words: Sequence[Sequence[int]], room: int) -> list[int | None]:
    starts: list[int | None] = []
    place = 0
    for ids in words:
        starts.append(place if ids and place < room else None)
        place += len(ids)
    return starts
