"""Words as a tokeniser is trained on them: pre-tokenised, counted, told to others."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import pre_tokenizers

LETTERS = frozenset(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
LONGEST_WORD = 2**16  # letters; no tokeniser learns anything from a longer one


def byte_level() -> pre_tokenizers.ByteLevel:
    """Cuts a text into words, the blank before a word being part of it; their letters are bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def count_words(rows: Iterable[Iterable[str]], min_rows: int = 1) -> dict[str, int]:
    """How often each word stands in the texts of ``rows``, of those that at least ``min_rows`` rows
    hold and that have at most ``LONGEST_WORD`` letters."""
    cutter, counts, holding = byte_level(), Counter[str](), Counter[str]()
    for texts in rows:
        words = [word for text in texts for word, _ in cutter.pre_tokenize_str(text)]
        words = [word for word in words if len(word) <= LONGEST_WORD]
        counts.update(words)
        holding.update(set(words))
    return {word: count for word, count in counts.items() if holding[word] >= min_rows}
