"""Tasks on text that a causal model continues, and of these texts as one stream of tokens; metrics:
perplexity and token accuracy."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from collapipe.data.folders import Lines
from collapipe.errors import WAY_OUT_AFTER_AGGREGATION, NonFiniteLossError
from collapipe.statistics import Statistics
from collapipe.tasks.synthetic import sentences
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import FolderTask, TextTask
from collapipe.tensors import IGNORED, Batch, padded
from collapipe.text.tokenizer import Tokenizer

_AT_ONCE = 10_000  # texts
Ids = NDArray[np.int32]
_NONE = -1  # no token's id, and not IGNORED


def _parse(file: Lines) -> list[dict[str, Any]]:
    return [{"text": line.strip()} for line in file.lines if line.strip()]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences of tokens in rows of one or more, which do not see each other."""

    stream: Ids  # token ids, int32 [tokens]
    targets: Ids  # the same with ``IGNORED`` at tokens that are no targets
    starts: Sequence[int]  # the place of each sequence's first input in the stream
    sizes: Sequence[int]  # each sequence's number of inputs
    rows: Sequence[Sequence[int]]  # the numbers of each row's sequences
    tokenizer: Tokenizer

    @classmethod
    def to_continue(cls, texts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> "Sequences":
        """Return each text's token ids as a row without targets."""
        stream, sizes = np.fromiter(chain.from_iterable(texts), np.int32), [*map(len, texts)]
        starts = [*accumulate(sizes, initial=0)]
        targets = np.full_like(stream, IGNORED)
        return cls(stream, targets, starts, sizes, alone(len(sizes)), tokenizer)

    @property
    def lengths(self) -> list[int]:
        return [sum(self.sizes[number] for number in row) for row in self.rows]

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return a batch in which target i is the token after input i.

        The mask numbers the sequences if a row has several.
        """
        chosen = [self.rows[row] for row in rows]
        inputs = [self._joined(self.stream, row, 0) for row in chosen]
        targets = [self._joined(self.targets, row, 1) for row in chosen]
        numbers = [
            [place for place, n in enumerate(row, 1) for _ in range(self.sizes[n])]
            for row in chosen
        ]
        mask = padded(numbers, 0).to(torch.uint8)
        several = any(len(row) > 1 for row in chosen)
        pad = self.tokenizer.vocabulary.pad
        return Batch(
            padded(inputs, pad), mask if several else mask.bool(), padded(targets, IGNORED)
        )

    def _joined(self, values: Ids, row: Sequence[int], shift: int) -> list[int]:
        starts = [self.starts[number] + shift for number in row]
        parts = [values[a : a + self.sizes[n]] for a, n in zip(starts, row, strict=True)]
        joined: list[int] = np.concatenate(parts).tolist()
        return joined

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Return the token predicted after each row; ``collapipe.tasks.generation`` goes on."""
        return self.tokenizer.decode([ids[-1:] for ids in predictions])


def alone(count: int) -> list[tuple[int]]:
    """Return rows of one sequence each."""
    return [*zip(range(count), strict=True)]


class ContinuedText(TextTask):
    """The base of tasks whose targets are the tokens after their inputs."""

    __slots__ = ()
    heads = ("causal",)

    def last_tokens(self, texts: Sequence[Sequence[int]], special: int) -> list[Sequence[int]]:
        """Return the last tokens of each text, as many as ``truncated`` keeps of the first."""
        return [ids[::-1] for ids in self.truncated([ids[::-1] for ids in texts], special)]

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return 0 correct tokens [1], because texts show none; ``correct_tokens`` counts them."""
        return np.zeros(1, np.int64)

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        counts = statistics.counts
        return counts.shape == (1,) and int(counts[0]) <= statistics.tokens

    def score(self, statistics: Statistics) -> Score:
        """Return perplexity, exp(loss per token), and the share of correct tokens.

        Raises ``NonFiniteLossError`` on overflow.
        """
        loss = statistics.loss
        try:
            perplexity = math.exp(loss)
        except OverflowError as error:
            raise NonFiniteLossError(
                f"the evaluation's loss is {loss:.6g}, its perplexity infinite; "
                + WAY_OUT_AFTER_AGGREGATION
            ) from error
        how = f"context={self.max_length}:rows={statistics.rows}"
        accuracy = {"token accuracy": round(int(statistics.counts[0]) / statistics.tokens, 6)}
        signature = f"per token of the run's tokeniser:{how}"
        return Score("perplexity", round(perplexity, 6), signature, accuracy)


def correct_tokens(predictions: Sequence[Sequence[int]], targets: Tensor) -> int:
    """Return how many ``targets`` [b, t] equal the predictions at their places."""
    found = padded(predictions, _NONE).to(targets.device)[:, : targets.shape[1]]
    return int((found == targets[:, : found.shape[1]]).sum())


@dataclass(frozen=True, slots=True)
class CausalLM(ContinuedText, FolderTask):
    """Causal language modelling; rows have the column ``text``, a line of the folder's files."""

    name = "causal_lm"
    columns = ("text",)
    suffix, parse, made_up = "txt", _parse, sentences

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> Sequences:
        """Join all texts to one stream with EOS before, between and after them; split it to pieces.

        A piece's last target is the next piece's first token, so every token of the texts is a
        target exactly once.
        """
        stream = _stream(rows, tokenizer)
        starts, sizes = self._pieces(len(stream))
        return Sequences(stream, stream, starts, sizes, alone(len(sizes)), tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Sequences:
        """Return EOS, as before every text in training, and the last tokens of each text."""
        ends, eos = self.last_tokens(tokenizer.encode(texts), 1), tokenizer.vocabulary.eos
        return Sequences.to_continue([[eos, *ids] for ids in ends], tokenizer)

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Sequences:
        """Encode each text as a separate stream, with EOS before and after it."""
        eos = tokenizer.vocabulary.eos
        streams = [[eos, *ids, eos] for ids in tokenizer.encode(rows["text"][:])]
        starts, sizes, begin = list[int](), list[int](), 0
        for stream in streams:
            places, of_stream = self._pieces(len(stream))
            starts += [begin + place for place in places]
            sizes += of_stream
            begin += len(stream)
        whole = np.fromiter(chain.from_iterable(streams), np.int32)
        return Sequences(whole, whole, starts, sizes, alone(len(sizes)), tokenizer)

    def _pieces(self, tokens: int) -> tuple[range, list[int]]:
        """Return the starts and sizes of a stream's pieces of at most the maximum length."""
        starts = range(0, tokens - 1, self.max_length)
        return starts, [min(self.max_length, tokens - 1 - start) for start in starts]


def _stream(rows: Dataset, tokenizer: Tokenizer) -> Ids:
    """Return the texts as one stream, int32 [tokens]; encodes a few at a time to save memory."""
    eos = tokenizer.vocabulary.eos
    stream = array("i", [eos])
    for start in range(0, len(rows), _AT_ONCE):
        for ids in tokenizer.encode(rows[start : start + _AT_ONCE]["text"]):
            stream.extend(ids)
            stream.append(eos)
    return np.frombuffer(stream, np.int32)
