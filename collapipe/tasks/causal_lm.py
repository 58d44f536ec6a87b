"""Causal language modelling: texts as one stream of tokens; metric: perplexity."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.data.folders import Lines
from collapipe.errors import NonFiniteLossError
from collapipe.statistics import Statistics
from collapipe.tasks.synthetic import sentences
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import FolderTask
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.text.tokenizer import Tokenizer

_AT_ONCE = 10_000  # texts


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a stream of token ids, int32 [tokens], by first place and length.

    With ``targets``, a token's target is the next token in the stream.
    """

    stream: NDArray[np.int32]
    starts: Sequence[int]
    lengths: Sequence[int]
    targets: bool
    tokenizer: Tokenizer

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return a batch in which target i is the token after input i."""
        pieces = [self._slice(row, 0) for row in rows]
        following = [self._slice(row, 1) if self.targets else [] for row in rows]
        inputs = padded(pieces, self.tokenizer.vocabulary.pad)
        return Batch(inputs, mask_of(pieces), padded(following, IGNORED))

    def _slice(self, row: int, shift: int) -> list[int]:
        start = self.starts[row] + shift
        ids: list[int] = self.stream[start : start + self.lengths[row]].tolist()
        return ids

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Return the token predicted after each piece; longer continuations need the exported
        model's ``generate``."""
        return self.tokenizer.decode([ids[-1:] for ids in predictions])


def _parse(file: Lines) -> list[dict[str, Any]]:
    return [{"text": line.strip()} for line in file.lines if line.strip()]


@dataclass(frozen=True, slots=True)
class CausalLM(FolderTask):
    """Causal language modelling; rows have the column ``text``, a line of the folder's files."""

    name = "causal_lm"
    columns = ("text",)
    heads = ("causal",)
    suffix, parse, made_up = "txt", _parse, sentences

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Pieces:
        """Join all texts to one stream with EOS before, between and after them; split it to pieces.

        A piece's last target is the next piece's first token, so every token of the texts is a
        target exactly once.
        """
        stream, size = _stream(rows, tokenizer), self.max_length
        starts = range(0, len(stream) - 1, size)
        lengths = [min(size, len(stream) - 1 - start) for start in starts]
        return Pieces(stream, starts, lengths, True, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Pieces:
        """Return one piece per text: EOS, as before every text in training, and its last tokens."""
        backwards = [ids[::-1] for ids in tokenizer.encode(texts)]
        pieces = [[tokenizer.vocabulary.eos, *ids[::-1]] for ids in self.truncated(backwards, 1)]
        stream = np.fromiter(chain.from_iterable(pieces), np.int32)
        lengths = [len(ids) for ids in pieces]
        starts = list(accumulate(lengths, initial=0))
        return Pieces(stream, starts, lengths, False, tokenizer)

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Pieces:
        """Encode each text as a separate stream, with EOS before and after it."""
        eos, size = tokenizer.vocabulary.eos, self.max_length
        streams = [[eos, *ids, eos] for ids in tokenizer.encode(rows["text"][:])]
        begins = accumulate(map(len, streams), initial=0)
        starts, lengths = list[int](), list[int]()
        for begin, stream in zip(begins, streams, strict=False):
            places = range(0, len(stream) - 1, size)
            starts += [begin + place for place in places]
            lengths += [min(size, len(stream) - 1 - place) for place in places]
        whole = np.fromiter(chain.from_iterable(streams), np.int32)
        return Pieces(whole, starts, lengths, True, tokenizer)

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return no counts, because perplexity follows from the loss."""
        return np.zeros(0, np.int64)

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        return statistics.counts.shape == (0,)

    def score(self, statistics: Statistics) -> Score:
        """Return perplexity, exp(loss per token). Raises ``NonFiniteLossError`` on overflow."""
        loss = statistics.loss
        try:
            perplexity = math.exp(loss)
        except OverflowError as error:
            raise NonFiniteLossError(
                f"the evaluation's loss is {loss:.6g}, its perplexity infinite; lower optimizer.lr"
            ) from error
        signature = (
            f"per token of the run's tokeniser:context={self.max_length}:rows={statistics.rows}"
        )
        return Score("perplexity", round(perplexity, 6), signature)


def _stream(rows: Dataset, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the texts as one stream, int32 [tokens]; encodes a few at a time to save memory."""
    eos = tokenizer.vocabulary.eos
    stream = array("i", [eos])
    for start in range(0, len(rows), _AT_ONCE):
        for ids in tokenizer.encode(rows[start : start + _AT_ONCE]["text"]):
            stream.extend(ids)
            stream.append(eos)
    return np.frombuffer(stream, np.int32)
