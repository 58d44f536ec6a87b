"""A stream of tokens is cut without loss; each target is the token after its input."""

import gzip
import logging
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trained import scored, trained

from collapipe.config import load_overrides
from collapipe.errors import ConfigError, DataError, NonFiniteLossError
from collapipe.tasks import causal_lm as causal_lm_module
from collapipe.tasks.causal_lm import CausalLM
from collapipe.tasks.task import Task
from collapipe.text.tokenizer import Tokenizer
from collapipe.validation import typed

TEXTS = ["A hedgehog reads.", "Two ovens are asleep.", "Nobody greets the moon."]
ROWS = Dataset.from_dict({"text": TEXTS})


def causal_lm(root: Path | None = None, max_length: int = 8) -> CausalLM:
    """A task with rows from files in ``root``, or without rows."""
    return CausalLM(None if root is None else str(root), False, 300, max_length)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokeniser trained on ``TEXTS``."""
    return trained(causal_lm(), ROWS)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.integers(2, 12))
def test_pieces_hold_the_whole_stream(
    tokenizer: Tokenizer, texts: list[str], max_length: int
) -> None:
    """The joined inputs lack the stream's last token; the joined targets lack its first token."""
    examples = causal_lm(max_length=max_length).encode(
        Dataset.from_dict({"text": texts}), tokenizer
    )
    eos = tokenizer.vocabulary.eos
    stream = [eos]
    for text in texts:
        stream += [*tokenizer.encode([text])[0], eos]
    inputs, targets = [], []
    for row, length in enumerate(examples.lengths):
        batch = examples.batch([row])
        assert batch.inputs.shape == batch.targets.shape == (1, length)
        inputs += batch.inputs[0].tolist()
        targets += batch.targets[0].tolist()
    assert inputs == stream[:-1]
    assert targets == stream[1:]
    assert set(examples.lengths[:-1]) <= {max_length}
    assert 1 <= examples.lengths[-1] <= max_length


def test_starts_of_one_stream_take_no_memory(tokenizer: Tokenizer) -> None:
    """A list would take 40 bytes for each piece."""
    examples = causal_lm().encode(ROWS, tokenizer)
    assert examples.starts == range(0, len(examples.stream) - 1, 8)


def test_encoding_texts_in_parts_gives_the_same_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = causal_lm().encode(ROWS, tokenizer)
    monkeypatch.setattr(causal_lm_module, "_AT_ONCE", 2)
    parts = causal_lm().encode(ROWS, tokenizer)
    assert parts.stream.tolist() == whole.stream.tolist()


def test_a_batch_pads_inputs_and_targets_equally(tokenizer: Tokenizer) -> None:
    examples = causal_lm().encode(ROWS, tokenizer)
    first, last = 0, len(examples.lengths) - 1
    assert examples.lengths[last] < examples.lengths[first]
    batch = examples.batch([last, first])
    assert batch.num_targets == int(batch.mask.sum()) == sum(examples.lengths[i] for i in (0, last))
    assert batch.mask[0].sum() == examples.lengths[last]


def test_inputs_keep_the_end_of_a_text(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The model continues the end of a text. EOS precedes each text, also an empty one."""
    task: Task = causal_lm(max_length=4)
    ids, eos = tokenizer.encode([TEXTS[1]])[0], tokenizer.vocabulary.eos
    with caplog.at_level(logging.WARNING):
        examples = task.inputs([TEXTS[1], "A", ""], tokenizer)
    batch = examples.batch(range(3))
    rows = [row[mask].tolist() for row, mask in zip(batch.inputs, batch.mask, strict=True)]
    assert rows == [[eos, *ids[-3:]], [eos, *tokenizer.encode(["A"])[0]], [eos]]
    assert batch.num_targets == 0
    assert "1 of 3 texts are longer than task.max_length=4" in caplog.text


def test_decode_shows_the_token_that_follows_the_text(tokenizer: Tokenizer) -> None:
    """Predictions for earlier tokens are ignored; EOS gives an empty text."""
    (hedgehog,), eos = tokenizer.encode(["h"]), tokenizer.vocabulary.eos
    examples = causal_lm().inputs(["A", "B"], tokenizer)
    assert examples.decode([[9, 9, *hedgehog], [*hedgehog, eos]]) == ["h", ""]


@pytest.mark.parametrize("tokens", [1, 17, 50_000])
def test_perplexity_of_a_uniform_guess_is_the_number_of_tokens(tokens: int) -> None:
    task: Task = causal_lm()
    score = scored(task, [], ROWS, math.log(tokens))
    assert score.name == "perplexity"
    assert score.value == pytest.approx(tokens)
    assert score.signature == "per token of the run's tokeniser:context=8:rows=3"


def test_an_infinite_perplexity_is_an_error() -> None:
    with pytest.raises(
        NonFiniteLossError,
        match=r"loss is 1000, .*optimizer\.lr or server_optimizer\.lr, or the noise",
    ):
        scored(causal_lm(), [], ROWS, 1000.0)


def test_rows_are_read_from_files(tmp_path: Path) -> None:
    """Files may be gzipped; blank lines are left out."""
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress("\n".join(TEXTS).encode()))
    (tmp_path / "valid.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
    (tmp_path / "test.txt").write_bytes("\r\n".join(TEXTS).encode())
    splits = causal_lm(tmp_path).splits(0)
    for rows in (splits.train, splits.validation, splits.test):
        assert rows.to_dict() == ROWS.to_dict()
    line = "Nobody\u2028greets\x0bthe\x85moon."  # characters at which splitlines() breaks
    (tmp_path / "test.txt").write_bytes(line.encode())
    assert causal_lm(tmp_path).splits(0).test["text"][:] == [line]
    (tmp_path / "test.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"test\.txt holds no rows"):
        _ = causal_lm(tmp_path).splits(0).test
    with pytest.raises(ConfigError, match=r"task causal_lm: no rows; .*data=synthetic"):
        causal_lm().splits(0)


@pytest.mark.parametrize(("field", "value"), [("vocabulary", 258), ("max_length", 2)])
def test_bad_fields_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{field}\b"):
        typed("task", CausalLM, {**asdict(causal_lm()), field: value})


def test_the_configuration_sets_the_source_of_rows(tmp_path: Path) -> None:
    overrides = ["task=causal_lm", "model=huggingface", "model.family=gpt2", "model.num_blocks=2"]
    assert load_overrides([*overrides, f"data.root={tmp_path}"]).task == CausalLM(
        str(tmp_path), False, 8000, 128
    )
    assert load_overrides([*overrides, "data=synthetic"]).task == CausalLM(None, True, 8000, 128)
