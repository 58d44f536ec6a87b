"""Prediction reads standard input in batches; input that is not UTF-8 is an error."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from trained import of_texts

from collapipe.cli.trained import predict
from collapipe.cli.trained.predict import as_texts, lines_of
from collapipe.errors import ConfigError
from collapipe.tasks import evaluation as prediction
from collapipe.tasks.evaluation import Predictor
from collapipe.tensors import Batch
from collapipe.text.tokenizer import Tokenizer


def test_standard_input_is_split_into_lines() -> None:
    stream = io.BytesIO("\ufeffone\r\nzwei ä\n\nlast".encode())
    assert [line for lines in lines_of(stream) for line in lines] == ["one", "zwei ä", "", "last"]


@pytest.mark.parametrize("content", [b"a\n\xff\n", b"a\n\x80\x04\x95", b"a\n\xed\xa0\x80\n"])
def test_bytes_that_are_not_utf8_are_reported_with_their_line(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"standard input:2\b.*0x[0-9a-f]{2}"):
        list(lines_of(io.BytesIO(content)))
    with pytest.raises(ConfigError, match=r"text 2\b"):
        as_texts(["a", content.decode("utf-8", "surrogateescape")])


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_LONGEST_LINE", 2**17)
    with pytest.raises(ConfigError, match=rf"standard input:1\b.*{2**17:,}"):
        list(lines_of(io.BytesIO(b"a" * 2**20)))


@dataclass
class Echo:
    """A fake task and model that answer with the length of the text."""

    max_length: int = 4
    dim: int = 8
    heads: tuple[str, ...] = ("pooled",)
    sizes: list[int] = field(default_factory=list)
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - cannot change

    @property
    def head(self) -> "Echo":
        return self

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> "Echo":
        self.texts = texts
        return self

    def batch(self, rows: Sequence[int]) -> Batch:
        self.sizes.append(len(rows))
        ids = torch.tensor([[len(text)] for text in self.texts])
        return Batch(ids, ids.bool(), ids)

    def encode(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return inputs

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return cast(list[list[int]], hidden.tolist())

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [str(row[0]) for row in ids]


def test_many_lines_are_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answers are returned before the last lines are processed."""
    monkeypatch.setattr(prediction, "_MOST_ROWS", 7)
    echo = cast(Any, Echo())
    answers = Predictor(echo, echo, of_texts(["a"], 259)).predict(["ab"] * 20)
    assert next(answers).text == "2"
    assert echo.sizes == [7]
    assert [answer.text for answer in answers] == ["2"] * 19
    assert echo.sizes == [7, 7, 6]
