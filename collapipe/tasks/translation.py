"""Translation: pairs of texts, and corpora of them in files or on the hub; metric: BLEU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU

from collapipe.data.folders import Splits, read_lines, read_splits
from collapipe.data.sources import read
from collapipe.errors import ConfigError, DataError
from collapipe.formatting import counted
from collapipe.sections import DataSettings
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
        order, how = bleu.max_ngram_order, bleu.smooth_method
        found = bleu.compute_bleu(n_grams[:order], n_grams[order:], words, reference, how)
        return Score("BLEU", round(float(found.score), 6), str(bleu.get_signature()))


@dataclass(frozen=True, slots=True)
class ParallelCorpus(Translation):
    """Parallel text: line n of one file translates line n of the other."""

    name: str  # of the task, as in ``task=NAME``
    # folder with ``{train,valid,test}.{source,target}``, plain or .gz (plain first); None: the hub
    root: str | None
    hub_name: str  # has splits train, validation and test and one column per language
    source: str  # language, as in the names of files or columns
    target: str  # likewise

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ConfigError(f"task.source and task.target are both {self.source!r}; set two")

    def splits(self, seed: int) -> Splits:
        """Return rows in the corpus's order; blank pairs of a folder are left out.

        Raises ``DataError`` for a folder, file or line that cannot be read or paired.
        """
        if self.root is not None:
            return read_splits(self.name, self.root, self._paired)
        hub = DataSettings(name=self.hub_name, source_column=self.source, target_column=self.target)
        return read(hub, self.columns, seed)

    def _paired(self, folder: Path, split: str) -> Dataset:
        source = read_lines(folder, f"{split}.{self.source}")
        target = read_lines(folder, f"{split}.{self.target}")
        if len(source.lines) != len(target.lines):
            raise DataError(
                f"{source.path} has {counted(len(source.lines), 'line')}, {target.path} has "
                f"{len(target.lines)}; line n of one must translate line n of the other"
            )
        rows = []
        for number, pair in enumerate(zip(source.lines, target.lines, strict=True), 1):
            left, right = map(str.strip, pair)
            if bool(left) != bool(right):
                blank = (target if left else source).at(number)
                raise DataError(f"{blank} is blank, its translation is not; fill it in")
            if left:
                rows.append({"source": left, "target": right})
        if not rows:
            raise DataError(f"{source.path} and {target.path} hold no text; a split needs one row")
        return Dataset.from_list(rows)
