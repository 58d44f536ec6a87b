"""Frozen weights that a unit uses are in memory once; others are read only to be sent."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor

from client_app.fixed_parts import FixedParts
from collapipe.errors import DataError
from collapipe.models.frozen import FrozenParts
from collapipe.models.transformer import TransformerSpec
from collapipe.process.torch_device import CPU
from collapipe.text.vocabulary import Vocabulary

DIGESTS = dict.fromkeys(("embedding", "blocks.0", "head"), "0" * 64)
VOCABULARY = Vocabulary(9, pad=0, bos=1, eos=2)


class Disk:
    """Stands for the files and the store in which parts are found."""

    def __init__(self) -> None:
        self.read = list[str]()
        self.lacks = ""

    def find(self, part: str) -> dict[str, Tensor] | None:
        self.read.append(part)
        if part == self.lacks:
            return None
        return {"weight": torch.ones(33)[1:], "own": torch.full((2,), len(part))}  # not aligned


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(FrozenParts, "find", lambda _, part: found.find(part))
    return found


def fixed_parts(used: Collection[str]) -> FixedParts:
    return FixedParts(DIGESTS, TransformerSpec(), VOCABULARY, torch.float32, [], used, CPU)


def test_a_used_part_is_read_once_and_aligned(disk: Disk) -> None:
    fixed = fixed_parts(["embedding"])
    first, second = (fixed["embedding"]["weight"] for _ in range(2))
    assert first is second and first.data_ptr() % 64 == 0
    for _ in range(2):
        assert fixed["blocks.0"]["weight"].data_ptr() % 64
    assert disk.read == ["embedding", "blocks.0", "blocks.0"]
    assert [*fixed] == [*DIGESTS] and len(fixed) == 3


@pytest.mark.usefixtures("disk")
def test_an_embedding_that_the_head_shares_is_one_tensor() -> None:
    """As in the original model; a block's equal weight stays a separate tensor."""
    fixed = fixed_parts(["head", "embedding", "blocks.0"])
    head, embedding, block = (fixed[part] for part in ("head", "embedding", "blocks.0"))
    assert embedding["weight"] is head["weight"] and embedding["own"] is not head["own"]
    assert block["weight"] is not head["weight"]


def test_missing_parts_are_looked_for_again(disk: Disk) -> None:
    """A used part that exists is read only once."""
    fixed = fixed_parts(["embedding", "head"])
    disk.lacks = "head"
    assert fixed.lacking() == ["head"]
    with pytest.raises(DataError):
        fixed["head"]
    disk.lacks = ""
    assert fixed.lacking() == []
    assert fixed["embedding"] and fixed["head"]
    assert disk.read == ["embedding", "blocks.0", "head", "head", "blocks.0", "head"]
