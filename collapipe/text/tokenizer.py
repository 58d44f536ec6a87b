"""Convert a run's texts and labels to numbers, count words, and check untrusted tokenisers."""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from collapipe.errors import ConfigError, DataError, one_line
from collapipe.text.chat_template import ChatTemplate
from collapipe.text.vocabulary import Vocabulary

_MOST_TOKENS = 2**22
_BLANK = "Ġ"  # a blank in byte-level tokenisers
_MOST_BYTES, _SECONDS = 2**27, 60
_PROBE = Path(__file__).with_name("probe.py")
# Splits texts into words, with the blank before a word; letters are bytes.
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
LETTERS = frozenset(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
LONGEST_WORD = 2**16  # letters; no tokeniser learns anything from a longer one


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens that represent no text: BERT's ``bos`` and ``eos`` are [CLS] and [SEP]."""

    pad: str = "<pad>"
    bos: str = "<s>"
    eos: str = "</s>"


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Convert the library's errors, including panics, into ``ConfigError``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what} ({one_line(error)})") from error


@dataclass(eq=False, repr=False)
class Tokenizer:
    """Converts text to token ids and back, and has the labels' names in the order of their ids.

    ``json_text`` is in the format of the tokenizers library. ``chat_template`` makes texts of
    conversations. Raises ``ConfigError`` if ``json_text`` is invalid or lacks the special tokens.
    """

    json_text: str
    special_tokens: SpecialTokens = SpecialTokens()
    labels: Sequence[str] = ()
    chat_template: ChatTemplate | None = None

    def __post_init__(self) -> None:
        self.labels = tuple(self.labels)
        self._tokenizer = _loaded(self.json_text)
        self._tokenizer.encode_special_tokens = True  # a typed "</s>" is text
        ids = self._tokenizer.get_vocab()
        special = asdict(self.special_tokens)
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
        """Invert ``pack``. Raises ``ConfigError`` for an invalid text."""
        try:
            kept = json.loads(text)
            words, labels = kept["tokenizer"], kept["labels"]
            special_tokens = SpecialTokens(**kept["marks"])
            template = None if kept["chat"] is None else ChatTemplate(**kept["chat"])
            if not isinstance(words, str) or not all(isinstance(name, str) for name in labels):
                raise TypeError("a name that is no text")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not a packed tokeniser ({error})") from error
        return cls(words, special_tokens, labels, template)

    def pack(self) -> str:
        """Return the tokeniser as JSON, to send it to units and save it with the run."""
        return json.dumps({"tokenizer": self.json_text, **self.described()})

    def described(self) -> dict[str, Any]:
        """Return special tokens, labels and chat template, as in ``model.json`` of a run."""
        chat = None if self.chat_template is None else asdict(self.chat_template)
        return {"marks": asdict(self.special_tokens), "labels": self.labels, "chat": chat}

    @classmethod
    def train_from_counts(cls, counts: Mapping[str, int], vocabulary: int) -> "Tokenizer":
        """Train byte-level BPE, which can encode any text.

        It merges the most frequent pairs in words with these ``counts`` (see ``count_words``) until
        there are ``vocabulary`` tokens.
        """
        tokenizer = tokenizers.Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(asdict(SpecialTokens()).values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        words = chain.from_iterable(repeat(word, count) for word, count in counts.items())
        tokenizer.train_from_iterator(words, trainer)
        tokenizer.pre_tokenizer, tokenizer.decoder = _BYTE_LEVEL, decoders.ByteLevel()
        return cls(tokenizer.to_str())

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        """Return a tokeniser with one token per byte and special tokens; it reveals no text."""
        return cls.train_from_counts({}, 0)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        with _failures("the tokeniser fails on a text"):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_chat(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Return each text's token ids [n], special tokens included, and the first character of
        each token and the first one after it [n, 2]. A chat template made the texts."""
        with _failures("the tokeniser fails on a text"):
            encoded = self._of_chats.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, np.int32), np.array(each.offsets, np.int64).reshape(-1, 2))
            for each in encoded
        ]

    @functools.cached_property
    def _of_chats(self) -> tokenizers.Tokenizer:
        return _loaded(self.json_text)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, without special tokens."""
        with _failures("the tokeniser fails on its own tokens"):
            rows = [list(row) for row in ids]
            return self._tokenizer.decode_batch(rows, skip_special_tokens=True)

    def encode_words(self, rows: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Return the token ids of each word of each row, without special tokens.

        A byte-level tokeniser of running text, such as GPT-2's, has tokens of words with the blank
        before them, so words are encoded with it. One trained on separate words has no such tokens.
        """
        words = list(dict.fromkeys(chain.from_iterable(rows)))  # a corpus repeats its words
        ids = dict(zip(words, self.encode([self._blank + word for word in words]), strict=True))
        return [[ids[word] for word in row] for row in rows]


def _loaded(json_text: str) -> tokenizers.Tokenizer:
    with _failures("not a tokeniser's JSON"):
        found = tokenizers.Tokenizer.from_str(json_text)
    found.no_padding()
    found.no_truncation()
    return found


def check_tokenizer(json_text: str, *how: str) -> None:
    """Raise ``ConfigError`` for a tokeniser's JSON that the library cannot use; with ``"packed"``,
    for a text that ``Tokenizer.unpack`` cannot use.

    The tokeniser must load and encode common texts and the texts named in its own rules. It is
    parsed and tried in a separate process first: the library may panic with a backtrace, or take
    all memory and end the process.
    """
    if len(json_text) > _MOST_BYTES:
        raise ConfigError(f"a tokeniser of {len(json_text):,} characters, at most {_MOST_BYTES:,}")
    environment = {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    try:
        tried = subprocess.run(  # noqa: S603, our own program
            [sys.executable, "-I", "-X", "utf8", str(_PROBE), *how],
            input=json_text.encode(errors="surrogatepass"),
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"a tokeniser that takes longer than {_SECONDS} s") from error
    if tried.returncode:
        output = tried.stderr.decode(errors="replace").strip() or f"status {tried.returncode}"
        raise ConfigError(f"not a tokeniser that works ({one_line(output.splitlines()[-1])})")


def count_words(rows: Iterable[Iterable[str]], min_rows: int = 1) -> dict[str, int]:
    """Count the words in the texts of ``rows``.

    Words in fewer than ``min_rows`` rows or with more than ``LONGEST_WORD`` letters are left out.
    Raises ``DataError`` for a text of another type, which only a user's own task yields.
    """
    counts, holding = Counter[str](), Counter[str]()
    for row, given in enumerate(rows, 1):
        texts = list(given)
        if kinds := [type(text).__name__ for text in texts if not isinstance(text, str)]:
            raise DataError(
                f"row {row}: a text is a {kinds[0]}, not a str; correct the task's rows"
            )
        words = [word for text in texts for word, _ in _BYTE_LEVEL.pre_tokenize_str(text)]
        words = [word for word in words if len(word) <= LONGEST_WORD]
        counts.update(words)
        holding.update(set(words))
    return {word: count for word, count in counts.items() if holding[word] >= min_rows}
