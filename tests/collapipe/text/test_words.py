"""A tokeniser trained on units' word counts equals a tokeniser trained on the texts."""

import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from collapipe.data.folders import read_lines
from collapipe.text.tokenizer import SpecialTokens, Tokenizer, count_words

LETTERS = st.sampled_from("ab 　鸡母蛋é\n7,.'s</>")
TEXTS = st.lists(st.text(LETTERS, max_size=30), max_size=12)


def of_texts(texts: list[str], vocabulary: int) -> str:
    """The tokeniser that the library trains on texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(asdict(SpecialTokens()).values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def of_counts(texts: list[str], vocabulary: int, units: int) -> str:
    """The tokeniser that a server trains on counts; each unit has every ``units``-th text."""
    counts = (count_words([text] for text in texts[unit::units]) for unit in range(units))
    words = sum(map(Counter, counts), Counter[str]())
    return Tokenizer.train_from_counts(words, vocabulary).json_text


@given(TEXTS, st.sampled_from([259, 265, 300]), st.integers(1, 4))
def test_counts_give_the_same_tokeniser_as_the_texts(
    texts: list[str], vocabulary: int, units: int
) -> None:
    assert of_counts(texts, vocabulary, units) == of_texts(texts, vocabulary)


@pytest.mark.skipif("COLLAPIPE_DATA" not in os.environ, reason="needs real texts")
def test_counts_of_chinese_texts_give_the_same_tokeniser_as_the_texts() -> None:
    root = Path(os.environ["COLLAPIPE_DATA"]) / "toutiao15"
    texts = [line.rpartition("\t")[0] for line in read_lines(root, "train.tsv").lines[:1500]]
    assert of_counts(texts, 1000, 3) == of_texts(texts, 1000)


def test_a_word_that_occurs_in_too_few_rows_is_not_reported() -> None:
    """The number of rows counts, not the number of occurrences."""
    rows = [["a hen", "a"], ["hen hen hen"], ["a secret secret secret"]]
    assert count_words(rows, 2) == {"a": 3, "Ġhen": 3}
    assert count_words(rows, 3) == {}
    assert sum(count_words(rows).values()) == 10


@given(st.text(max_size=40))
def test_the_tokeniser_of_bytes_encodes_any_text(text: str) -> None:
    """The tokeniser has one token per byte and three special tokens, and it merges no bytes."""
    tokenizer = Tokenizer.of_bytes()
    assert tokenizer.vocabulary.size == 256 + 3
    (ids,) = tokenizer.encode([text])
    assert len(ids) == len(text.encode())
    assert tokenizer.decode([ids]) == [text]
