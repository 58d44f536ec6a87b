"""Translation: pairs of texts, batches of pairs, BLEU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

import torch
from datasets import Dataset
from sacrebleu.metrics import BLEU
from torch import Tensor

from collapipe.batch import IGNORED, Batch
from collapipe.errors import ConfigError
from collapipe.tasks.task import Score
from collapipe.tasks.tokenizer import Tokenizer, Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequencePairs:
    """Token ids of source and target texts, row by row, without marks."""

    sources: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    vocabulary: Vocabulary

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sources)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Both sides end with EOS; no BOS, for the decoder shifts the targets itself."""
        end = self.vocabulary.eos
        sources = [[*self.sources[row], end] for row in rows]
        targets = [[*self.targets[row], end] for row in rows]
        mask = _padded([[1] * len(ids) for ids in sources], 0).bool()
        return Batch(_padded(sources, self.vocabulary.pad), mask, _padded(targets, IGNORED))


def _padded(sequences: Sequence[Sequence[int]], fill: int) -> Tensor:
    width = max(map(len, sequences), default=0)
    rows = [[*ids, *[fill] * (width - len(ids))] for ids in sequences]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def require_at_least(task: object, field: str, minimum: int, why: str) -> None:
    """Raise ``ConfigError`` if an integer field of a task is smaller than ``minimum``."""
    value = getattr(task, field)
    if value < minimum:
        raise ConfigError(f"task.{field} is {value}; set it to at least {minimum} ({why})")


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

    vocabulary: int
    max_length: int

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` where no tokeniser or no text could come of the fields."""
        require_at_least(self, "vocabulary", 259, "a token for each of 256 bytes and 3 marks")
        require_at_least(self, "max_length", 2, "one token and the end mark")

    @property
    def metric(self) -> str:
        """Corpus BLEU, cased and detokenised, as sacrebleu defines it."""
        return "BLEU"

    def train_tokenizer(self, rows: Dataset) -> Tokenizer:
        """One tokeniser for both sides, so that they can share an embedding."""
        return Tokenizer.train(chain(rows["source"], rows["target"]), self.vocabulary)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> SequencePairs:
        """Both sides as token ids."""
        sources, targets = (self._ids(rows[side], tokenizer) for side in ("source", "target"))
        return SequencePairs(sources, targets, tokenizer.vocabulary)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Batch:
        """Source texts as a batch; its targets have length 0."""
        sources = self._ids(texts, tokenizer)
        pairs = SequencePairs(sources, [[] for _ in sources], tokenizer.vocabulary)
        batch = pairs.batch(range(len(pairs)))
        return Batch(batch.inputs, batch.mask, batch.targets[:, :0])

    def decode(self, predictions: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
        """Text up to the first EOS: what a batched decoder wrote behind it means nothing."""
        end = tokenizer.vocabulary.eos
        return tokenizer.decode([list(takewhile(end.__ne__, ids)) for ids in predictions])

    def score(self, predictions: Sequence[str], rows: Dataset) -> Score:
        """BLEU against the rows' whole targets, cut or not."""
        bleu = BLEU()
        value = bleu.corpus_score(list(predictions), [list(rows["target"])]).score
        return Score(self.metric, round(float(value), 6), str(bleu.get_signature()))

    def _ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        encoded = tokenizer.encode(texts)
        room = self.max_length - 1  # the end mark takes one
        if cut := sum(len(ids) > room for ids in encoded):
            limit = f"task.max_length={self.max_length}"
            log.warning("%d of %d texts are longer than %s and were cut", cut, len(encoded), limit)
        return [ids[:room] for ids in encoded]
