"""Labelled texts are encoded without loss, labels have a fixed order, errors name the line."""

import gzip
import logging
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bad_files import assert_named
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trained import scored, trained

from collapipe.config import load_overrides
from collapipe.data.folders import Splits
from collapipe.errors import ConfigError, DataError
from collapipe.runs.rows import make_tokenizer
from collapipe.tasks.classification import Classification, LabelledTexts
from collapipe.tasks.task import Task
from collapipe.tasks.text_task import count_labels
from collapipe.text.tokenizer import Tokenizer
from collapipe.validation import typed
from collapipe.wire.messages import RowsReply

TEXTS = ["Rain all day.", "The hedgehog won.", "Snow, and more snow.", "A draw."]
LABELS = ["weather", "sport", "weather", "sport"]
ROWS = Dataset.from_dict({"text": TEXTS, "label": LABELS})
DATA = Path(os.environ.get("COLLAPIPE_DATA", Path(__file__).parents[4] / "shared/data"))
BERT = ("task=classification", "model=huggingface", "model.family=bert")


def classification(root: Path | None = None, max_length: int = 32) -> Classification:
    """A task with rows from files in ``root``, or without rows."""
    return Classification(None if root is None else str(root), False, 300, max_length)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokeniser trained on ``ROWS``."""
    task = classification()
    return trained(task, ROWS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``ROWS`` as files; the training file is gzipped."""
    lines = [f"{text}\t{int(name == 'sport')}" for text, name in zip(TEXTS, LABELS, strict=True)]
    content = "\n".join(lines)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "valid.tsv").write_text(content + "\n\n", encoding="utf-8")
    (tmp_path / "test.tsv").write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    (tmp_path / "labels.txt").write_text("weather\nsport\n", encoding="utf-8")
    return tmp_path


@given(st.lists(st.lists(st.integers(3, 299), max_size=9), min_size=1, max_size=6), st.data())
def test_a_batch_has_each_text_between_its_special_tokens(
    tokenizer: Tokenizer, texts: list[list[int]], data: st.DataObject
) -> None:
    """Without padding, a batch has the requested rows in order, with one target for each row."""
    labels = [[number % 2] for number in range(len(texts))]
    examples = LabelledTexts(texts, labels, tokenizer)
    rows, marks = data.draw(st.permutations(range(len(texts)))), tokenizer.vocabulary
    batch = examples.batch(rows)
    for i, row in enumerate(rows):
        assert batch.inputs[i][batch.mask[i]].tolist() == [marks.bos, *texts[row], marks.eos]
        assert batch.mask[i].sum() == examples.lengths[row]
        assert batch.mask[i].long().diff().le(0).all(), "padding is not at the end"
    assert batch.targets.tolist() == [labels[row] for row in rows]
    assert examples.decode(labels) == [tokenizer.labels[label] for (label,) in labels]


def test_inputs_are_encoded_like_rows(tokenizer: Tokenizer) -> None:
    """A text that a user types is encoded in the same way as a training row."""
    task: Task = classification()
    typed = task.inputs(TEXTS, tokenizer).batch(range(4))
    rows = task.encode(ROWS, tokenizer).batch(range(4))
    assert torch.equal(typed.inputs, rows.inputs)
    assert (typed.targets.shape, typed.num_targets) == ((4, 0), 0)
    assert [tokenizer.labels[label] for (label,) in rows.targets.tolist()] == LABELS
    assert task.inputs([], tokenizer).batch([]).num_samples == 0


def test_long_texts_are_cut_and_counted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """``max_length`` includes the two special tokens, which are kept."""
    with caplog.at_level(logging.WARNING):
        examples = classification(max_length=5).encode(ROWS, tokenizer)
    batch, marks = examples.batch(range(4)), tokenizer.vocabulary
    assert batch.inputs.shape == (4, 5)
    assert batch.inputs[:, 0].eq(marks.bos).all()
    assert batch.inputs[:, 4].eq(marks.eos).all()
    assert "3 of 4 texts are longer than task.max_length=5" in caplog.text


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["b", "a", "b"], {"a": 1, "b": 2}),
        (["10", "9", "-1", "9"], {"-1": 1, "9": 2, "10": 1}),
        (["10", "9", "x"], {"10": 1, "9": 1, "x": 1}),
        ([], {}),
    ],
)
def test_labels_are_ordered_by_name_or_number(names: list[str], order: dict[str, int]) -> None:
    """The order of the rows does not matter."""
    for given_names in (names, names[::-1]):
        assert list(count_labels(given_names).items()) == list(order.items())


def test_a_label_without_a_training_row_is_named(tokenizer: Tokenizer) -> None:
    """The error states its row and a fix."""
    rows = Dataset.from_dict({"text": TEXTS[:2], "label": ["sport", "opera"]})
    with pytest.raises(DataError, match=r"row 2: label 'opera' .*sport, weather.*leave") as caught:
        classification().encode(rows, tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["classification", "ner"])
def test_a_run_uses_the_labels_that_its_options_list(task: str) -> None:
    """The run sorts the labels and keeps labels that no row has."""
    name = {"classification": "pooled", "ner": "tokens"}[task]
    options = [f"task={task}", "model=huggingface", "model.family=bert", f"model.head={name}"]
    settings = load_overrides([*options, "task.labels=[O,B-b,B-a]"])
    reports = [RowsReply(0, 3, {"B-b": 2}, {})]
    assert make_tokenizer(settings, reports).labels == ("B-a", "B-b", "O")
    for labels in ("[]", "[O]", "[O,B-a,O]", "[O,'']"):
        with pytest.raises(ConfigError, match=r"task\.labels"):
            load_overrides([*options, f"task.labels={labels}"])
    if task == "ner":
        with pytest.raises(ConfigError, match=r"task\.labels: .*PER"):
            load_overrides([*options, "task.labels=[O,PER]"])
    else:
        assert load_overrides([*options, "task.labels=[10,9]"]).task.listed_labels == ("9", "10")


def test_the_score_is_accuracy_with_macro_f1() -> None:
    """By hand: of 2 + 2 rows, three are predicted as sport; the F1 scores are 4/5 and 2/3."""
    task: Task = classification()
    score = scored(task, ["weather", "sport", "sport", "sport"], ROWS)
    assert (score.name, score.value) == ("accuracy", 0.75)
    assert score.extra_metrics == {"macro-F1": pytest.approx((4 / 5 + 2 / 3) / 2, abs=1e-6)}
    assert score.signature.startswith("sklearn ")
    assert score.signature.endswith(":rows=4")
    assert scored(task, LABELS, ROWS).value == 1


def test_rows_are_read_from_files(folder: Path) -> None:
    """Files may be gzipped and have a final line break, a byte order mark or CR characters."""
    splits = classification(folder).splits(seed=0)
    for rows in (splits.train, splits.validation, splits.test):
        assert rows.to_dict() == ROWS.to_dict()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("test.tsv", None, ["test.tsv", "test.tsv.gz", "data.root"]),
        ("labels.txt", None, ["labels.txt"]),
        ("labels.txt", b"\n", ["labels.txt is empty"]),
        ("labels.txt", b"weather\nweather\n", ["labels.txt: two labels", "'weather'"]),
        ("labels.txt", b"weather\n", ["train.tsv.gz:2: label '1'", "labels.txt"]),
        ("valid.tsv", b"Rain\t0\nSnow\n", ["valid.tsv:2 is not a text, a tab"]),
        ("valid.tsv", b"Rain\t0\n \t1\n", ["valid.tsv:2 is not a text, a tab"]),
        ("valid.tsv", b"Rain\t0\nSnow\tsport\n", ["valid.tsv:2: label 'sport'", "0 … 1"]),
        ("valid.tsv", b"Rain\t-1\n", ["valid.tsv:1: label '-1'"]),
        ("valid.tsv", b"Rain\t0\nSn\xffow\t1\n", ["valid.tsv:2", "UTF-8", "0xff"]),
        ("valid.tsv", b"\n", ["valid.tsv holds no rows"]),
        ("train.tsv.gz", b"no archive", ["train.tsv.gz cannot be read"]),
    ],
)
def test_bad_files_are_named(
    folder: Path, file: str, content: bytes | None, words: list[str]
) -> None:
    assert_named(classification(folder), folder / file, content, words)


def test_the_error_for_missing_rows_names_all_sources_of_rows() -> None:
    with pytest.raises(ConfigError) as caught:
        classification().splits(0)
    ways = ("data.root=", "data.train_file=", "data.name=", "data=synthetic")
    assert all(way in str(caught.value) for way in ways)
    with pytest.raises(DataError, match=r"no folder absent; correct data\.root"):
        classification(Path("absent")).splits(0)


@pytest.mark.parametrize(
    ("field", "value"), [("vocabulary", 258), ("max_length", 2), ("max_length", 2**15 + 1)]
)
def test_bad_fields_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{field}\b"):
        typed("task", Classification, {**asdict(classification()), field: value})


def test_the_configuration_sets_the_source_of_rows(folder: Path) -> None:
    """``data.root`` and ``data=synthetic`` also set the task's options."""
    assert load_overrides([*BERT, f"data.root={folder}"]).task == Classification(
        str(folder), False, 8000, 128
    )
    settings = load_overrides([*BERT, "data=synthetic"])
    assert settings.task == Classification(None, True, 8000, 128)
    assert settings.model.head == "pooled"


def real(folder: str) -> Splits:
    """The rows of a real data set; skip the test if the data set is missing."""
    if not (DATA / folder).is_dir():
        pytest.skip(f"no {folder} in {DATA}")
    return classification(DATA / folder).splits(0)


@pytest.mark.parametrize(
    ("folder", "sizes", "labels", "most_frequent", "accuracy"),
    [
        ("toutiao15", [40_009, 5_001, 5_001], 15, "news_entertainment", 0.112),
        ("mr_en", [8_528, 1_066, 1_066], 2, "positive", 0.499),
    ],
)
def test_real_data_sets_are_read_completely(
    folder: str, sizes: list[int], labels: int, most_frequent: str, accuracy: float
) -> None:
    """Counts are as published; always predicting the most frequent label has this accuracy."""
    splits, task = real(folder), classification()
    assert [len(rows) for rows in (splits.train, splits.validation, splits.test)] == sizes
    counts = Counter(task.label_counts(splits.train))
    assert len(counts) == labels
    assert counts.most_common(1)[0][0] == most_frequent
    score = scored(task, [most_frequent] * sizes[2], splits.test)
    assert score.value == pytest.approx(accuracy, abs=5e-4)


def test_a_folders_vocabulary_tokenizes_chinese_titles() -> None:
    """About 1 % of their tokens are unknown to bert-base-chinese."""
    task, splits, folder = classification(), real("toutiao15"), DATA / "bert-base-chinese"
    settings = load_overrides([*BERT, f"data.tokenizer={folder}"])
    report = RowsReply(0, len(splits.train), task.label_counts(splits.train), {})
    tokenizer = make_tokenizer(settings, [report])
    assert tokenizer.vocabulary.size == 21_128
    assert tokenizer.vocabulary.num_labels == 15
    unknown = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n").index("[UNK]")
    ids = [token for row in tokenizer.encode(splits.test["text"]) for token in row]
    assert 0.005 < ids.count(unknown) / len(ids) < 0.02
