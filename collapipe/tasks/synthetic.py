"""Synthetic rows, with which each task can be tried and learned in seconds without files.

Every set is a pure function of the seed and has no duplicate rows.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.random import Generator

from collapipe.data.folders import Splits
from collapipe.seeds import derive

TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS = 1200, 150, 150
Row = Mapping[str, Any]

_COMMON = (
    "a the this that and then but with very quite some we they it was is had for on today again "
    "good small new old came took gave found"
)
_TOPICS = {
    "cooking": "pan oven soup salt onion butter dough spoon simmer bake kettle pepper",
    "garden": "seed soil rake hedge bloom weed tulip spade prune compost pond moss",
    "music": "chord flute choir tempo drum melody violin opera rhythm hum tune organ",
    "sailing": "mast anchor harbour keel wave deck rudder tide sail buoy rope mooring",
}
_OTHER_TOPIC, _OWN_TOPIC = 0.03, 0.4  # fractions of a text's words

_STARTS = "ba be do fa ga ki lo mu ne po ra su ti vo za"
_ENDS = {"PER": "lin mar nok", "LOC": "ham berg dorf", "ORG": "tex corp"}
_KINDS = "works bank press"
_PATTERNS = [
    "PER lives in LOC",
    "PER works for ORG in LOC",
    "ORG of LOC pays PER",
    "in LOC we met PER and PER",
    "ORG has bought ORG",
    "the road to LOC is long",
    "PER never went to LOC or LOC",
]

_GRAMMAR = {
    "S": ["NP VP .", "NP VP and NP VP ."],
    "NP": ["DET N", "DET ADJ N", "DET N PP"],
    "VP": ["V NP", "sleeps PP", "V NP PP"],
    "PP": ["P DET N"],
    "DET": ["the", "a", "every"],
    "ADJ": ["small", "grey", "sleepy", "quick"],
    "N": ["fox", "hen", "barn", "river", "child", "cart"],
    "V": ["sees", "follows", "likes", "draws"],
    "P": ["near", "behind", "under"],
}


def topics(seed: int) -> Splits:
    """Return texts about one of four topics, which differ in a few words among common ones."""
    return _splits(seed, "topics", _topic)


def entities(seed: int) -> Splits:
    """Return sentences with persons, places and organisations; last syllables distinguish them."""
    return _splits(seed, "entities", _tagged)


def sentences(seed: int) -> Splits:
    """Return sentences of a small grammar."""
    return _splits(seed, "sentences", lambda random: {"text": " ".join(_grow("S", random))})


def _splits(seed: int, purpose: str, draw: Callable[[Generator], Row]) -> Splits:
    random = np.random.default_rng(derive(seed, purpose))
    rows: dict[str, Row] = {}
    while len(rows) < TRAIN_ROWS + VALIDATION_ROWS + TEST_ROWS:
        row = draw(random)
        rows.setdefault(repr(row), row)
    drawn = list(rows.values())
    bounds = 0, TRAIN_ROWS, TRAIN_ROWS + VALIDATION_ROWS, len(drawn)
    return Splits(*(Dataset.from_list(drawn[start:stop]) for start, stop in pairwise(bounds)))


def _one_of(choices: str | Sequence[str], random: Generator) -> str:
    """Draw an item of a list, or a word of a text."""
    choices = choices.split() if isinstance(choices, str) else choices
    return choices[int(random.integers(len(choices)))]


def _topic(random: Generator) -> Row:
    label = _one_of(list(_TOPICS), random)
    words = [_word_about(label, random) for _ in range(int(random.integers(6, 15)))]
    words[int(random.integers(len(words)))] = _one_of(_TOPICS[label], random)  # at least one
    return {"text": " ".join(words), "label": label}


def _word_about(label: str, random: Generator) -> str:
    draw = random.random()
    if draw < _OTHER_TOPIC:
        label = _one_of(list(_TOPICS), random)
    return _one_of(_TOPICS[label] if draw < _OTHER_TOPIC + _OWN_TOPIC else _COMMON, random)


def _tagged(random: Generator) -> Row:
    tokens: list[str] = []
    tags: list[str] = []
    for word in _one_of(_PATTERNS, random).split():
        if word in _ENDS:
            name = _name(word, random)
            tokens += name
            tags += [f"B-{word}", *[f"I-{word}"] * (len(name) - 1)]
        else:
            tokens.append(word)
            tags.append("O")
    return {"tokens": tokens, "tags": tags}


def _name(kind: str, random: Generator) -> list[str]:
    """Return a person's one or two names, a place, or an organisation with its kind."""
    words = [_name_word(kind, random)]
    if kind == "PER" and random.random() < 0.5:
        words.append(_name_word(kind, random))
    return [*words, _one_of(_KINDS, random)] if kind == "ORG" else words


def _name_word(kind: str, random: Generator) -> str:
    syllables = (_one_of(part, random) for part in (_STARTS, _STARTS, _ENDS[kind]))
    return "".join(syllables).capitalize()


def _grow(symbol: str, random: Generator) -> list[str]:
    if symbol not in _GRAMMAR:
        return [symbol]
    rule = _one_of(_GRAMMAR[symbol], random).split()
    return [word for part in rule for word in _grow(part, random)]
