"""Byte-level BPE: any text can be written with it, none is unknown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from collapipe.errors import ConfigError

PAD, BOS, EOS = "<pad>", "<s>", "</s>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model must know of a tokeniser: its size and the ids of its marks."""

    size: int
    pad: int
    bos: int
    eos: int


class Tokenizer:
    """Text to token ids and back. Raises ``ConfigError`` for JSON that is no tokeniser.

    The JSON text is the whole tokeniser: it travels to the units and is saved with the run.
    """

    def __init__(self, json_text: str) -> None:
        self.json_text = json_text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # the library's own kind: Exception itself
            raise ConfigError(f"not a tokeniser's JSON ({error})") from error
        self._tokenizer.encode_special_tokens = True  # a typed "</s>" is text, not a mark

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """Merge the most frequent pairs of ``texts`` until ``vocabulary`` tokens are known."""
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[PAD, BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read what ``save`` wrote."""
        return cls(path.read_text(encoding="utf-8"))

    def save(self, path: Path) -> None:
        """Write the tokeniser's JSON."""
        path.write_text(self.json_text, encoding="utf-8")

    @property
    def vocabulary(self) -> Vocabulary:
        """Size and marks."""
        ids = self._tokenizer.get_vocab()
        return Vocabulary(len(ids), ids[PAD], ids[BOS], ids[EOS])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without marks."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence, marks left out."""
        return self._tokenizer.decode_batch([list(row) for row in ids], skip_special_tokens=True)
