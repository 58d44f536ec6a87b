"""What turns a run's texts and labels into numbers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from collapipe.errors import ConfigError, one_line


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model must know of a tokeniser: size, ids of special tokens, number of labels."""

    size: int
    pad: int
    bos: int
    eos: int
    num_labels: int = 0

    @property
    def num_classes(self) -> int:
        """What a target can be: labels where the task has them, else tokens."""
        return self.num_labels or self.size


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens that stand for no text: BERT's ``bos`` and ``eos`` are [CLS] and [SEP]."""

    pad: str = "<pad>"
    bos: str = "<s>"
    eos: str = "</s>"


OWN_SPECIAL_TOKENS = SpecialTokens()
_MOST_TOKENS = 2**22
_BLANK = "Ġ"  # as byte-level tokenisers write it


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Make a ``ConfigError`` of whatever the library raises, its panics included."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what} ({one_line(error)})") from error


class Tokenizer:
    """Text to token ids and back, and the names of the labels, in the order of their ids.

    Raises ``ConfigError`` for JSON that is no tokeniser, or one without its special tokens.

    Attributes
    ----------
    json_text
        The tokeniser in the format of the tokenizers library.
    """

    def __init__(
        self,
        json_text: str,
        special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS,
        labels: Sequence[str] = (),
    ) -> None:
        self.json_text, self.special_tokens = json_text, special_tokens
        self.labels = tuple(labels)
        with _failures("not a tokeniser's JSON"):
            self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
        self._tokenizer.encode_special_tokens = True  # a typed "</s>" is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab()
        special = asdict(special_tokens)
        for token in special.values():
            if token not in ids:
                raise ConfigError(f"a tokeniser without its special token {token!r}")
        size = max(ids.values()) + 1
        if size > _MOST_TOKENS:
            raise ConfigError(f"a tokeniser with ids up to {size - 1}, at most {_MOST_TOKENS - 1}")
        named = {name: ids[token] for name, token in special.items()}
        self.vocabulary = Vocabulary(size, **named, num_labels=len(self.labels))
        self._blank = " " if any(len(t) > 1 and t.startswith(_BLANK) for t in ids) else ""

    @classmethod
    def unpack(cls, text: str) -> "Tokenizer":
        """Of what ``pack`` returned."""
        try:
            kept = json.loads(text)
            words, labels = kept["tokenizer"], kept["labels"]
            special_tokens = SpecialTokens(**kept["marks"])
            if not isinstance(words, str) or not all(isinstance(name, str) for name in labels):
                raise TypeError("a name that is no text")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not a packed tokeniser ({error})") from error
        return cls(words, special_tokens, labels)

    def pack(self) -> str:
        """All of it as JSON: it travels to the units and is saved with the run."""
        kept = {
            "tokenizer": self.json_text,
            "marks": asdict(self.special_tokens),
            "labels": self.labels,
        }
        return json.dumps(kept)

    def with_labels(self, labels: Sequence[str]) -> "Tokenizer":
        """The same tokens, and names of labels."""
        return Tokenizer(self.json_text, self.special_tokens, labels)

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """Byte-level BPE, which can write any text: merge the most frequent pairs of ``texts``
        until ``vocabulary`` tokens are known."""
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(asdict(OWN_SPECIAL_TOKENS).values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        with _failures("the tokeniser fails on a text"):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sequence, special tokens left out."""
        with _failures("the tokeniser fails on its own tokens"):
            rows = [list(row) for row in ids]
            return self._tokenizer.decode_batch(rows, skip_special_tokens=True)

    def encode_words(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Token ids of each word of each row, without special tokens.

        A byte-level tokeniser of running text, such as GPT-2's, knows words with the blank before
        them, and so a word is encoded; one trained on words alone knows none.
        """
        words = list(dict.fromkeys(chain.from_iterable(rows)))  # a corpus repeats its words
        ids = dict(zip(words, self.encode([self._blank + word for word in words]), strict=True))
        return [[ids[word] for word in row] for row in rows]
