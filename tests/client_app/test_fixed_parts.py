"""Frozen weights that a unit uses are in memory once; others are read only to be sent."""

from collections.abc import Iterator, Mapping
from typing import cast

import pytest
import torch
from torch import Tensor

from client_app.fixed_parts import FixedParts
from collapipe.errors import DataError
from collapipe.models.frozen import FrozenParts
from collapipe.process.torch_device import CPU


class _Parts(Mapping[str, dict[str, Tensor]]):
    def __init__(self) -> None:
        self.read = list[str]()
        self.lacks = ""

    def __getitem__(self, part: str) -> dict[str, Tensor]:
        raise DataError(f"{part} is not here")

    def find(self, part: str) -> dict[str, Tensor] | None:
        self.read.append(part)
        if part == self.lacks:
            return None
        return {"weight": torch.ones(33)[1:], "own": torch.full((2,), len(part))}  # not aligned

    def __iter__(self) -> Iterator[str]:
        return iter(("embedding", "blocks.0", "head"))

    def __len__(self) -> int:
        return 3


def test_a_used_part_is_read_once_and_aligned() -> None:
    parts = _Parts()
    fixed = FixedParts(cast(FrozenParts, parts), ["embedding"], CPU)
    first, second = (fixed["embedding"]["weight"] for _ in range(2))
    assert first is second and first.data_ptr() % 64 == 0
    for _ in range(2):
        assert fixed["blocks.0"]["weight"].data_ptr() % 64
    assert parts.read == ["embedding", "blocks.0", "blocks.0"]
    assert [*fixed] == [*parts] and len(fixed) == 3


def test_an_embedding_that_the_head_shares_is_one_tensor() -> None:
    """As in the original model; a block's equal weight stays a separate tensor."""
    fixed = FixedParts(cast(FrozenParts, _Parts()), ["head", "embedding", "blocks.0"], CPU)
    head, embedding, block = (fixed[part] for part in ("head", "embedding", "blocks.0"))
    assert embedding["weight"] is head["weight"] and embedding["own"] is not head["own"]
    assert block["weight"] is not head["weight"]


def test_missing_parts_are_looked_for_again() -> None:
    """A used part that exists is read only once."""
    parts = _Parts()
    fixed = FixedParts(cast(FrozenParts, parts), ["embedding", "head"], CPU)
    parts.lacks = "head"
    assert fixed.lacking() == ["head"]
    with pytest.raises(DataError):
        fixed["head"]
    parts.lacks = ""
    assert fixed.lacking() == []
    assert fixed["embedding"] and fixed["head"]
    assert parts.read == ["embedding", "blocks.0", "head", "head", "blocks.0", "head"]
