"""Translation: pairs of texts, batches of pairs, BLEU."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from datasets import Dataset
from sacrebleu.metrics import BLEU

from collapipe.batch import IGNORED, Batch
from collapipe.tasks.task import Score, TextLength, VocabularySize
from collapipe.text.padding import mask_of, padded, truncate
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SequencePairs:
    """Token ids of source and target texts, row by row, without marks."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Source tokens of each row, with the end mark."""
        return [len(ids) + 1 for ids in self.sources]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Both sides end with EOS; no BOS, for the decoder shifts the targets itself."""
        marks = self.tokenizer.vocabulary
        sources = [[*self.sources[row], marks.eos] for row in rows]
        targets = [[*self.targets[row], marks.eos] for row in rows]
        return Batch(padded(sources, marks.pad), mask_of(sources), padded(targets, IGNORED))

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Text up to the first EOS: what a batched decoder wrote behind it means nothing."""
        end = self.tokenizer.vocabulary.eos
        return self.tokenizer.decode([list(takewhile(end.__ne__, ids)) for ids in predictions])


@dataclass(frozen=True, slots=True)
class Translation:
    """What all translation tasks share; rows have the columns ``source`` and ``target``.

    Attributes
    ----------
    vocabulary
        Tokens known to the joint tokeniser, at most.
    max_length
        Tokens a side, including the end mark; what is longer is cut.
    """

    vocabulary: VocabularySize
    max_length: TextLength

    @property
    def columns(self) -> tuple[str, ...]:
        """A text and its translation."""
        return ("source", "target")

    @property
    def heads(self) -> tuple[str, ...]:
        """See ``Task``."""
        return ("decoder",)

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        """None: it predicts text."""
        return {}

    def train_tokenizer(self, rows: Dataset) -> Tokenizer:
        """One tokeniser for both sides, so that they can share an embedding."""
        return Tokenizer.train(chain(rows["source"], rows["target"]), self.vocabulary)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> SequencePairs:
        """Both sides as token ids."""
        sources, targets = (self._ids(rows[side], tokenizer) for side in ("source", "target"))
        return SequencePairs(sources, targets, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> SequencePairs:
        """Source texts; their targets are empty."""
        sources = self._ids(texts, tokenizer)
        return SequencePairs(sources, [[] for _ in sources], tokenizer)

    def score(self, predictions: Sequence[str], rows: Dataset, loss: float) -> Score:
        """Corpus BLEU against the rows' whole targets, cut or not: cased and detokenised, as
        sacrebleu defines it."""
        bleu = BLEU()
        value = bleu.corpus_score(list(predictions), [list(rows["target"])]).score
        return Score("BLEU", round(float(value), 6), str(bleu.get_signature()))

    def _ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[Sequence[int]]:
        room = self.max_length - 1  # the end mark takes one
        return truncate(tokenizer.encode(texts), room, self.max_length, "texts")
