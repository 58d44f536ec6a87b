"""Translation: pairs of texts, batches of pairs, BLEU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from datasets import Dataset
from sacrebleu.metrics import BLEU

from collapipe.batch import IGNORED, Batch, mask_of, padded
from collapipe.tasks.task import Score, TextLength, VocabularySize
from collapipe.tasks.text_task import TextTask
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SequencePairs:
    """Token ids of source and target texts, row by row, without special tokens."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Source tokens of each row, with EOS."""
        return [len(ids) + 1 for ids in self.sources]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Both sides end with EOS; no BOS, for the decoder shifts the targets itself."""
        vocabulary = self.tokenizer.vocabulary
        sources = [[*self.sources[row], vocabulary.eos] for row in rows]
        targets = [[*self.targets[row], vocabulary.eos] for row in rows]
        return Batch(padded(sources, vocabulary.pad), mask_of(sources), padded(targets, IGNORED))

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Text up to the first EOS: what a batched decoder wrote behind it means nothing."""
        end = self.tokenizer.vocabulary.eos
        return self.tokenizer.decode([list(takewhile(end.__ne__, ids)) for ids in predictions])


@dataclass(frozen=True, slots=True)
class Translation(TextTask):
    """What all translation tasks share; rows have the columns ``source`` and ``target``."""

    vocabulary: VocabularySize
    max_length: TextLength

    columns = ("source", "target")
    heads = ("decoder",)

    def texts(self, rows: Dataset) -> Iterable[Iterable[str]]:
        """Both sides: with one tokeniser they can share an embedding."""
        return zip(rows["source"], rows["target"], strict=True)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> SequencePairs:
        sources, targets = (
            self.truncated(tokenizer.encode(rows[side]), 1) for side in self.columns
        )
        return SequencePairs(sources, targets, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> SequencePairs:
        sources = self.truncated(tokenizer.encode(texts), 1)
        return SequencePairs(sources, [[] for _ in sources], tokenizer)

    def score(self, predictions: Sequence[str], rows: Dataset, loss: float) -> Score:
        """Corpus BLEU against the rows' whole targets, cased and detokenised, as sacrebleu
        defines it."""
        bleu = BLEU()
        value = bleu.corpus_score(list(predictions), [list(rows["target"])]).score
        return Score("BLEU", round(float(value), 6), str(bleu.get_signature()))
