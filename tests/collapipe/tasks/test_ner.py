"""Words keep their tags through tokenisation, and F1 is strict."""

import gzip
import logging
import os
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest
import seqeval.metrics
import tokenizers
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from seqeval.scheme import IOB2
from tokenizers import models, normalizers, pre_tokenizers
from trained import of_texts, scored, trained

from collapipe.config import load_overrides
from collapipe.errors import ConfigError, DataError
from collapipe.tasks.ner import NamedEntities, TaggedSentences
from collapipe.tasks.task import Task
from collapipe.tensors import IGNORED
from collapipe.text.tokenizer import SpecialTokens, Tokenizer
from collapipe.validation import typed

WORDS = [["Ada", "met", "Grace", "Hopper"], ["in", "New", "York", "."]]
TAGS = [["B-PER", "O", "B-PER", "I-PER"], ["O", "B-LOC", "I-LOC", "O"]]
ROWS = Dataset.from_dict({"tokens": WORDS, "tags": TAGS})
NAMES = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
DATA = Path(os.environ.get("COLLAPIPE_DATA", Path(__file__).parents[4] / "shared/data"))
# Known, in two pieces, unknown; BERT tokenisers drop the last two: a wide space and a bell.
PIECES = {"ab": 1, "abba": 2, "zz": 1, "\u3000": 0, "\x07": 0}

tagged = st.lists(st.tuples(st.sampled_from(list(PIECES)), st.sampled_from(NAMES)), max_size=8)
words = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1)


def ner(root: Path | None = None, max_length: int = 32) -> NamedEntities:
    """A task with rows from files in ``root``, or without rows."""
    return NamedEntities(None if root is None else str(root), False, 300, max_length)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokeniser trained on ``ROWS``."""
    return replace(trained(ner(), ROWS), labels=NAMES)


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    """A tokeniser like BERT's."""
    known = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "ab", "##ba"]
    pieces = models.WordPiece({word: i for i, word in enumerate(known)}, unk_token="[UNK]")
    whole = tokenizers.Tokenizer(pieces)
    whole.normalizer = normalizers.BertNormalizer()
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(whole.to_str(), SpecialTokens("[PAD]", "[CLS]", "[SEP]"), NAMES)


def predicted(examples: TaggedSentences) -> list[list[int]]:
    """The predictions of a perfect model, with an arbitrary label at ignored targets."""
    batch = examples.batch(range(len(examples.lengths)))
    targets = batch.targets.masked_fill(batch.targets == IGNORED, 3)
    return [row[mask].tolist() for row, mask in zip(targets, batch.mask, strict=True)]


@given(st.lists(tagged, min_size=1, max_size=4), st.integers(3, 12))
def test_tags_survive_tokenisation(
    wordpiece: Tokenizer, sentences: list[list[tuple[str, str]]], max_length: int
) -> None:
    """Perfect predictions give the words' tags, and O for words without a token or cut off."""
    rows = Dataset.from_dict(
        {
            "tokens": [[word for word, _ in row] for row in sentences],
            "tags": [[tag for _, tag in row] for row in sentences],
        }
    )
    examples = ner(max_length=max_length).encode(rows, wordpiece)
    expected, num_targets = [], 0
    for row in sentences:
        tags, place = [], 0
        for word, tag in row:
            seen = PIECES[word] > 0 and place < max_length - 2
            tags.append(tag if seen else "O")
            num_targets += seen
            place += PIECES[word]
        expected.append(" ".join(tags))
    assert examples.decode(predicted(examples)) == expected
    assert examples.batch(range(len(sentences))).num_targets == num_targets
    assert max(examples.lengths) <= max_length


def test_a_words_first_token_has_its_tag(wordpiece: Tokenizer) -> None:
    """A word's other tokens and the special tokens have no tag."""
    rows = Dataset.from_dict(
        {"tokens": [["abba", "\x07", "ab"]], "tags": [["B-PER", "O", "I-PER"]]}
    )
    batch = ner().encode(rows, wordpiece).batch([0])
    assert batch.inputs.tolist() == [[1, 4, 5, 4, 2]]
    assert batch.targets.tolist() == [[IGNORED, 1, IGNORED, 3, IGNORED]]


@pytest.fixture(scope="module")
def running_text() -> Tokenizer:
    """A tokeniser like GPT-2's: most of its words begin with a space."""
    return of_texts([" ".join(["a hen met an owl, and", *WORDS[0]])] * 3, 320)


@given(st.lists(st.one_of(words, st.sampled_from(WORDS[0])), max_size=6))
def test_words_are_encoded_as_in_running_text(
    running_text: Tokenizer, tokenizer: Tokenizer, sentence: list[str]
) -> None:
    """Otherwise pretrained models would get tokens that were rare in their training."""
    whole = running_text.encode(["".join(f" {word}" for word in sentence)])[0]
    assert list(chain.from_iterable(running_text.encode_words([sentence])[0])) == whole
    own = tokenizer.encode_words([sentence])[0]
    assert own == tokenizer.encode(sentence), "trained on words alone"


def test_inputs_are_words_or_characters(tokenizer: Tokenizer) -> None:
    """Spaces separate words; a text without spaces is split into characters."""
    task: Task = ner()
    typed, rows = (
        examples.batch(range(2))
        for examples in (
            task.inputs([" ".join(words) for words in WORDS], tokenizer),
            task.encode(ROWS, tokenizer),
        )
    )
    assert torch.equal(typed.inputs, rows.inputs)
    assert (typed.targets != IGNORED).sum() == 0
    examples = task.inputs(["張三在", " ", "Ada"], tokenizer)
    tags = [[4] * length for length in examples.lengths]
    assert examples.decode(tags) == ["O O O", "", "O O O"]


def test_long_sentences_are_cut_and_scored_whole(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """An entity that was cut off counts as not found."""
    first = len(tokenizer.encode(["Ada"])[0])
    with caplog.at_level(logging.WARNING):
        examples = ner(max_length=first + 2).encode(ROWS.select([0]), tokenizer)
    assert "1 of 1 sentences are longer than task.max_length" in caplog.text
    tags = examples.decode(predicted(examples))
    assert tags == ["B-PER O O O"]
    score = scored(ner(), tags, ROWS.select([0]))
    assert score.extra_metrics == {
        "precision": 1,
        "recall": 0.5,
    }


@given(st.lists(st.lists(st.sampled_from(NAMES), min_size=5, max_size=5), min_size=2, max_size=6))
def test_the_score_is_seqevals_strict_f1(sentences: list[list[str]]) -> None:
    """The score equals seqeval's functions in strict mode, also for tags that form no entity."""
    truth = [["B-PER", "I-PER", "O", "B-LOC", "O"]] * len(sentences)
    rows = Dataset.from_dict({"tokens": [list("abcde")] * len(truth), "tags": truth})
    score = scored(ner(), [" ".join(tags) for tags in sentences], rows)
    options = {"mode": "strict", "scheme": IOB2, "zero_division": 0}
    found = {
        name: round(
            float(getattr(seqeval.metrics, f"{name}_score")(truth, sentences, **options)), 6
        )
        for name in ("f1", "precision", "recall")
    }
    assert (score.value, *score.extra_metrics.values()) == tuple(found.values())


def test_the_signature_states_how_entities_are_counted() -> None:
    """Tags without a B- tag form no entity, although seqeval's lenient mode would count one."""
    rows = Dataset.from_dict({"tokens": [["New", "York"]], "tags": [["B-LOC", "I-LOC"]]})
    score = scored(ner(), ["I-LOC I-LOC"], rows)
    assert seqeval.metrics.f1_score([["B-LOC", "I-LOC"]], [["I-LOC", "I-LOC"]]) == 1
    assert (score.name, score.value) == ("strict F1", 0)
    assert "mode=strict:scheme=IOB2:average=micro:rows=1" in score.signature
    assert score.signature.startswith("seqeval ")
    assert scored(ner(), ["O O"], rows).value == 0


def test_rows_are_read_from_files(tmp_path: Path) -> None:
    """Files may be gzipped, with tabs or spaces and extra blank lines; a wide space is a word."""
    lines = [
        "\n".join(f"{word} {tag}" for word, tag in zip(words, tags, strict=True))
        for words, tags in zip(WORDS, TAGS, strict=True)
    ]
    content = "\n\n".join(lines)
    (tmp_path / "train.conll.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "valid.conll").write_text("\n" + content.replace(" ", "\t") + "\n\n \n\n")
    (tmp_path / "test.conll").write_bytes(content.replace("\n", "\r\n").encode())
    splits = ner(tmp_path).splits(0)
    for rows in (splits.train, splits.validation, splits.test):
        assert rows.to_dict() == ROWS.to_dict()
    (tmp_path / "test.conll").write_text("\u3000 O\n", encoding="utf-8")
    assert ner(tmp_path).splits(0).test.to_list() == [{"tokens": ["\u3000"], "tags": ["O"]}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Ada", "train.conll:2 is not a word, a blank and its tag"),
        (" O", "train.conll:2 is not a word"),
        ("Ada NNP B-PER", "train.conll:2 is not a word"),
        ("Ada PER", "train.conll:2: tag 'PER' is not O, B-TYPE or I-TYPE"),
        ("Ada S-PER", "tag 'S-PER'"),
        ("Ada B-", "tag 'B-'"),
        ("Ada I-PER", "train.conll:2: tag 'I-PER' continues no entity; in IOB2"),
        ("Ada B-PER\nRome I-LOC", "conll:3: tag 'I-LOC' continues no entity"),
        ("Ada B-PER\n\nMary I-PER", "conll:4: tag 'I-PER' continues no entity"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "train.conll").write_text(f"so O\n{line}\n")
    with pytest.raises(DataError) as caught:
        _ = ner(tmp_path).splits(0).train
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tag_that_no_training_row_has_is_named(tokenizer: Tokenizer) -> None:
    rows = Dataset.from_dict({"tokens": [["a"], ["b"]], "tags": [["O"], ["B-MISC"]]})
    with pytest.raises(DataError, match=r"row 2: label 'B-MISC' .*B-LOC, B-PER, I-LOC"):
        ner().encode(rows, tokenizer)
    assert list(ner().label_counts(ROWS).items()) == [
        ("B-LOC", 1), ("B-PER", 2), ("I-LOC", 1), ("I-PER", 1), ("O", 3)
    ]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [("vocabulary", 258), ("max_length", 2)])
def test_bad_fields_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{field}\b"):
        typed("task", NamedEntities, {**asdict(ner()), field: value})


def test_the_configuration_sets_the_source_of_rows(tmp_path: Path) -> None:
    """``data.root`` and ``data=synthetic`` also set the task's options."""
    overrides = ["task=ner", "model=huggingface", "model.family=bert"]
    settings = load_overrides([*overrides, f"data.root={tmp_path}"])
    assert settings.task == NamedEntities(str(tmp_path), False, 8000, 128)
    assert settings.model.head == "tokens"
    settings = load_overrides([*overrides, "data=synthetic"])
    assert settings.task == NamedEntities(None, True, 8000, 128)


@pytest.mark.skipif(not (DATA / "chinese_ner").is_dir(), reason=f"no chinese_ner in {DATA}")
def test_a_real_data_set_is_read_completely() -> None:
    """Counts are as published; predicting each character's most frequent tag has this F1."""
    task = ner(DATA / "chinese_ner")
    splits = task.splits(0)
    sizes = [len(rows) for rows in (splits.train, splits.validation, splits.test)]
    assert sizes == [20_864, 2_318, 4_636]
    assert task.label_counts(splits.train) == {
        "B-LOC": 16_571, "B-ORG": 9_277, "B-PER": 8_144,
        "I-LOC": 22_531, "I-ORG": 37_689, "I-PER": 15_881, "O": 869_087,
    }  # fmt: skip
    tags_of: dict[str, Counter[str]] = defaultdict(Counter)
    words, tags = splits.train["tokens"][:], splits.train["tags"][:]
    for pair in zip(chain.from_iterable(words), chain.from_iterable(tags), strict=True):
        tags_of[pair[0]][pair[1]] += 1
    usual = {character: tags.most_common(1)[0][0] for character, tags in tags_of.items()}
    predictions = [" ".join(usual.get(c, "O") for c in words) for words in splits.test["tokens"][:]]
    assert scored(task, predictions, splits.test).value == pytest.approx(0.140, abs=5e-4)
