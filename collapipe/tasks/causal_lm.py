"""Causal language modelling: texts as one stream of tokens."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from datasets import Dataset

from collapipe.data.folders import Lines
from collapipe.tasks.continued_text import ContinuedText, Ids, Sequences, alone
from collapipe.tasks.synthetic import sentences
from collapipe.tasks.text_task import FolderTask
from collapipe.text.tokenizer import Tokenizer

_AT_ONCE = 10_000  # texts


def _parse(file: Lines) -> list[dict[str, Any]]:
    return [{"text": line.strip()} for line in file.lines if line.strip()]


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
        stream, size = _stream(rows, tokenizer), self.max_length
        starts = range(0, len(stream) - 1, size)
        lengths = [min(size, len(stream) - 1 - start) for start in starts]
        return Sequences(stream, stream, starts, lengths, alone(len(lengths)), tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> Sequences:
        """Return EOS, as before every text in training, and the last tokens of each text."""
        ends, eos = self.last_tokens(tokenizer.encode(texts), 1), tokenizer.vocabulary.eos
        return Sequences.to_continue([[eos, *ids] for ids in ends], tokenizer)

    def encode_apart(self, rows: Dataset, tokenizer: Tokenizer) -> Sequences:
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
        return Sequences(whole, whole, starts, lengths, alone(len(lengths)), tokenizer)


def _stream(rows: Dataset, tokenizer: Tokenizer) -> Ids:
    """Return the texts as one stream, int32 [tokens]; encodes a few at a time to save memory."""
    eos = tokenizer.vocabulary.eos
    stream = array("i", [eos])
    for start in range(0, len(rows), _AT_ONCE):
        for ids in tokenizer.encode(rows[start : start + _AT_ONCE]["text"]):
            stream.extend(ids)
            stream.append(eos)
    return np.frombuffer(stream, np.int32)
