"""Parallel files become pairs and batches without loss; errors in files name the line."""

import gzip
import logging
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bad_files import assert_named
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trained import scored, trained

from collapipe.data import hub
from collapipe.errors import ConfigError, DataError
from collapipe.tasks.task import Task
from collapipe.tasks.translation import ParallelCorpus, SequencePairs
from collapipe.tensors import IGNORED
from collapipe.text.tokenizer import Tokenizer
from collapipe.validation import typed

CUT_SHORT = gzip.compress(b"Eins\n" * 99, mtime=0)[:-9]
GERMAN = ["Ein Igel liest Zeitung.", "Zwei Öfen schlafen schon.", "Niemand grüßt den Mond."]
ENGLISH = ["A hedgehog reads the paper.", "Two ovens are asleep.", "Nobody greets the moon."]
ROWS = Dataset.from_dict({"source": GERMAN, "target": ENGLISH})
DATA = Path(os.environ.get("COLLAPIPE_DATA", Path(__file__).parents[4] / "shared/data"))

sentences = st.lists(st.lists(st.integers(3, 299), max_size=9), min_size=1, max_size=6)


def corpus(root: Path | None, max_length: int = 32) -> ParallelCorpus:
    """A task with rows from files in ``root``, or from the hub."""
    return ParallelCorpus(
        vocabulary=400,
        max_length=max_length,
        name="tiny",
        root=None if root is None else str(root),
        hub_name="nobody/tiny",
        source="de",
        target="en",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete corpus; German files are gzipped, English files are plain."""
    for split in ("train", "valid", "test"):
        packed = gzip.compress("\n".join(GERMAN).encode())
        (tmp_path / f"{split}.de.gz").write_bytes(packed)
        (tmp_path / f"{split}.en").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokeniser trained on ``ROWS``."""
    return trained(corpus(None), ROWS)


@given(sentences, st.data())
def test_a_batch_has_each_requested_row_completely(
    tokenizer: Tokenizer, sources: list[list[int]], data: st.DataObject
) -> None:
    """Without padding, a batch has the requested rows in order, each with its EOS."""
    targets = sources[::-1]
    rows = data.draw(st.permutations(range(len(sources))))
    marks = tokenizer.vocabulary
    batch = SequencePairs(sources, targets, tokenizer).batch(rows)
    assert batch.inputs.shape == batch.mask.shape
    assert batch.num_targets == sum(len(ids) + 1 for ids in targets)
    for i, row in enumerate(rows):
        assert batch.inputs[i][batch.mask[i]].tolist() == [*sources[row], marks.eos]
        assert batch.targets[i][batch.targets[i] != IGNORED].tolist() == [*targets[row], marks.eos]
        assert (batch.inputs[i][~batch.mask[i]] == marks.pad).all()
        assert batch.mask[i].long().diff().le(0).all(), "padding is not at the end"


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_any_text_survives_encoding_and_decoding(texts: list[str]) -> None:
    """Decoding ignores tokens after EOS."""
    task = corpus(None)
    tokenizer = trained(task, ROWS)
    texts = [text for text in texts if "<" not in text]
    ids = [[*row, tokenizer.vocabulary.eos, 5, 6] for row in tokenizer.encode(texts)]
    assert SequencePairs([], [], tokenizer).decode(ids) == texts


def test_inputs_are_encoded_like_rows(tokenizer: Tokenizer) -> None:
    """A text that a user types is encoded in the same way as a training row."""
    task = corpus(None)
    typed = task.inputs(GERMAN, tokenizer).batch(range(3))
    rows = task.encode(ROWS, tokenizer).batch(range(3))
    assert torch.equal(typed.inputs, rows.inputs)
    assert torch.equal(typed.mask, rows.mask)
    assert task.inputs([], tokenizer).batch([]).num_samples == 0


def test_long_rows_are_cut_and_counted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """``max_length`` includes EOS."""
    whole = corpus(None).encode(ROWS, tokenizer)
    with caplog.at_level(logging.WARNING):
        pairs = corpus(None, max_length=4).encode(ROWS, tokenizer)
    assert [list(ids) for ids in pairs.sources] == [list(ids[:3]) for ids in whole.sources]
    assert pairs.batch([0, 1, 2]).inputs.shape == (3, 4)
    assert "3 of 3 texts are longer than task.max_length=4" in caplog.text


def test_the_same_rows_train_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert trained(corpus(None), ROWS).json_text == tokenizer.json_text


def test_references_score_100_and_wrong_translations_less() -> None:
    """The signature states the tokenisation of the score."""
    right, wrong = (scored(corpus(None), texts, ROWS) for texts in (ENGLISH, ENGLISH[::-1]))
    assert right.value == pytest.approx(100)
    assert wrong.value < 50
    assert right.name == "BLEU"
    assert "tok:13a" in right.signature


def test_rows_are_read_from_files(folder: Path) -> None:
    """Files may be gzipped and have a final line break, a byte order mark or CR characters."""
    crlf = "\ufeff" + "\r\n".join(ENGLISH)
    (folder / "valid.en").write_bytes(crlf.encode())
    task: Task = corpus(folder)
    splits = task.splits(seed=0)
    for rows in (splits.train, splits.validation, splits.test):
        assert rows.to_dict() == ROWS.to_dict()


def test_lines_end_at_line_breaks_only(folder: Path) -> None:
    """U+2028 and similar characters are part of a sentence."""
    lines = [*ENGLISH[:2], "Nobody\u2028greets\x0bthe\x85moon."]
    (folder / "train.en").write_bytes("\n".join(lines).encode())
    assert corpus(folder).splits(0).train["target"][2] == lines[2]


def test_pairs_blank_on_both_sides_are_left_out(folder: Path) -> None:
    """Files often end with blank pairs, which are useless for training."""
    (folder / "test.de").write_text("\n\nEins\n\n", encoding="utf-8")
    (folder / "test.en").write_text(" \n\nOne\n\n", encoding="utf-8")
    assert corpus(folder).splits(0).test.to_list() == [{"source": "Eins", "target": "One"}]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("valid.en", None, ["valid.en", "valid.en.gz", "data.root"]),
        ("test.en", b"One\n", ["test.de.gz has 3 lines", "test.en has 1"]),
        ("train.en", b"One\nTw\xff\nThree\n", ["train.en:2", "UTF-8", "0xff"]),
        ("train.en", b"One\n \nThree\n", ["train.en:2 is blank"]),
        ("train.de.gz", gzip.compress(b"Eins\n\nDrei\n", mtime=0), ["train.de.gz:2 is blank"]),
        ("train.de.gz", b"no archive", ["train.de.gz cannot be read"]),
        ("train.de.gz", CUT_SHORT, ["train.de.gz cannot be read"]),
        ("train.en", b"", ["train.en has 0"]),
    ],
)
def test_bad_files_are_named(
    folder: Path, file: str, content: bytes | None, words: list[str]
) -> None:
    assert_named(corpus(folder), folder / file, content, words)


def test_an_empty_split_and_a_missing_folder_are_refused(folder: Path) -> None:
    (folder / "valid.de").touch()
    (folder / "valid.en").write_bytes(b"\n")
    with pytest.raises(DataError, match=r"valid\.de has 0 lines, .*valid\.en has 1"):
        _ = corpus(folder).splits(0).validation
    (folder / "valid.en").write_bytes(b"")
    with pytest.raises(DataError, match=r"valid\.de and .*valid\.en hold no text"):
        _ = corpus(folder).splits(0).validation
    with pytest.raises(DataError, match=r"no folder .*absent; correct data\.root"):
        corpus(folder / "absent").splits(0)


def test_rows_are_read_from_columns_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a root, the languages are the names of the hub's columns."""
    rows = ROWS.rename_columns({"source": "de", "target": "en"})
    splits = {"nobody/tiny": dict.fromkeys(("train", "validation", "test"), lambda: rows)}
    monkeypatch.setattr(hub, "load", lambda place, name, config: splits[name])
    assert corpus(None).splits(0).validation.to_dict() == ROWS.to_dict()


@pytest.mark.parametrize("error", [ConnectionError("no\nroute"), ValueError(), KeyError("en")])
def test_the_error_for_an_unreachable_hub_names_a_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Every error of the hub's client is reported in this way."""

    def fail(*_: str | None) -> None:
        raise error

    monkeypatch.setattr(hub, "_check_card", fail)
    with pytest.raises(DataError, match=r"nobody/tiny.*set data\.root=FOLDER") as caught:
        corpus(None).splits(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocabulary", 258), ("max_length", 2), ("max_length", 10**9), ("source", "en")],
)
def test_bad_fields_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{field}\b"):
        typed("task", ParallelCorpus, {**asdict(corpus(None)), field: value})


@pytest.mark.skipif(not (DATA / "multi30k").is_dir(), reason=f"no Multi30K in {DATA}")
def test_multi30k_is_read_completely() -> None:
    """Counts are as published; copying the source has a BLEU below 1."""
    task = corpus(DATA / "multi30k", max_length=128)
    splits = task.splits(0)
    sizes = [len(rows) for rows in (splits.train, splits.validation, splits.test)]
    assert sizes == [29_000, 1_014, 1_000]
    assert scored(task, splits.test["source"], splits.test).value < 1
