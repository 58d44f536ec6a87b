"""Translation: pairs of texts; metric: BLEU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU

from collapipe.statistics import Statistics
from collapipe.tasks.task import Score, TextLength, VocabularySize
from collapipe.tasks.text_task import TextTask
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SequencePairs:
    """Token ids of source and target texts, row by row, without special tokens."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Number of source tokens of each row, with EOS."""
        return [len(ids) + 1 for ids in self.sources]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return a batch; both sides end with EOS. The decoder itself adds BOS to its inputs."""
        vocabulary = self.tokenizer.vocabulary
        sources = [[*self.sources[row], vocabulary.eos] for row in rows]
        targets = [[*self.targets[row], vocabulary.eos] for row in rows]
        return Batch(padded(sources, vocabulary.pad), mask_of(sources), padded(targets, IGNORED))

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Return the text before the first EOS; later tokens of a batch have no meaning."""
        end = self.tokenizer.vocabulary.eos
        return self.tokenizer.decode([list(takewhile(end.__ne__, ids)) for ids in predictions])


@dataclass(frozen=True, slots=True)
class Translation(TextTask):
    """Base of translation tasks; rows have the columns ``source`` and ``target``."""

    vocabulary: VocabularySize
    max_length: TextLength

    columns = ("source", "target")
    heads = ("decoder",)

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        """Return both sides of all rows, for one common tokeniser and embedding."""
        return zip(rows["source"], rows["target"], strict=True)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> SequencePairs:
        sources, targets = (
            self.truncated(tokenizer.encode(rows[side]), 1) for side in self.columns
        )
        return SequencePairs(sources, targets, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> SequencePairs:
        sources = self.truncated(tokenizer.encode(texts), 1)
        return SequencePairs(sources, [[] for _ in sources], tokenizer)

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return sacrebleu's counts, int64 [2 + 2·order].

        They are the words of predictions and of targets (whole, cased, detokenised), then for each
        order the matching n-grams, then the predicted n-grams.
        """
        found = BLEU().corpus_score(list(predictions), [list(rows["target"])])
        return np.array([found.sys_len, found.ref_len, *found.counts, *found.totals])

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """Whether no more n-grams match than are predicted, and 1-grams are as many as words."""
        counts, order = statistics.counts, BLEU().max_ngram_order
        matching, predicted = counts[2 : 2 + order], counts[2 + order :]
        return (
            counts.shape == (2 + 2 * order,)
            and bool((matching <= predicted).all())
            and bool(predicted[0] == counts[0])
        )

    def score(self, statistics: Statistics) -> Score:
        """Return corpus BLEU, computed by sacrebleu from the counts."""
        bleu = BLEU(references=[[""]])  # for a signature with one reference per row
        words, reference, *n_grams = statistics.counts.tolist()
        order = bleu.max_ngram_order
        value = bleu.compute_bleu(
            n_grams[:order],
            n_grams[order:],
            words,
            reference,
            smooth_method=bleu.smooth_method,
            smooth_value=bleu.smooth_value,
            effective_order=bleu.effective_order,
            max_ngram_order=order,
        ).score
        return Score("BLEU", round(float(value), 6), str(bleu.get_signature()))
