"""Split texts into words and count them, to train a tokeniser on the counts."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import pre_tokenizers

LETTERS = frozenset(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
LONGEST_WORD = 2**16  # letters; no tokeniser learns anything from a longer one


def byte_level() -> pre_tokenizers.ByteLevel:
    """Return a splitter of texts into words, with the blank before a word; letters are bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def count_words(rows: Iterable[Iterable[str]], min_rows: int = 1) -> dict[str, int]:
    """Count the words in the texts of ``rows``.

    Words in fewer than ``min_rows`` rows or with more than ``LONGEST_WORD`` letters are left out.
    """
    cutter, counts, holding = byte_level(), Counter[str](), Counter[str]()
    for texts in rows:
        words = [word for text in texts for word, _ in cutter.pre_tokenize_str(text)]
        words = [word for word in words if len(word) <= LONGEST_WORD]
        counts.update(words)
        holding.update(set(words))
    return {word: count for word, count in counts.items() if holding[word] >= min_rows}
