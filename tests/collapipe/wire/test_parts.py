"""Joined tensors form a part in the format of safetensors."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_files import without_elements
from safetensors.torch import load, save

from collapipe.errors import WireError
from collapipe.wire.parts import grouped, joined, mapped_part, separated


def test_a_part_is_a_safetensors_file(tmp_path: Path) -> None:
    """A part may have tensors of all dtypes and strides, empty tensors and scalars."""
    tensors = {
        "weight": torch.arange(12.0).view(3, 4).t(),
        "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "double": torch.rand(2, 2, dtype=torch.float64),
        "count": torch.tensor(3),
        "packed": torch.tensor([3, 255], dtype=torch.uint8),
        "small": torch.tensor([-3, 127], dtype=torch.int8),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "empty of NumPy": torch.from_numpy(np.zeros(0, np.int64)),  # its stride is 0
        "one of many": torch.ones(1).expand(5)[:1],
        "näme/step": torch.tensor(1.0),
    }
    data, file = joined(tensors).numpy().tobytes(), tmp_path / "part"
    file.write_bytes(data)
    read, mapped = separated(data), mapped_part(file)
    theirs = load(save({name: each.contiguous() for name, each in tensors.items()}))
    assert read.keys() == mapped.keys() == theirs.keys()
    assert list(read) == list(tensors)
    for name, each in tensors.items():
        assert read[name].dtype == each.dtype
        assert mapped[name].dtype == each.dtype
        assert torch.equal(read[name], each)
        assert torch.equal(mapped[name], each)


def test_repeated_reading_takes_no_more_memory(tmp_path: Path) -> None:
    """A replica is read after each step."""
    file = tmp_path / "part"
    file.write_bytes(joined({f"w{k}": torch.zeros(1000) for k in range(20)}).numpy().tobytes())
    mapped_part(file)
    before = sys.getallocatedblocks()
    for _ in range(50):
        mapped_part(file)
    assert sys.getallocatedblocks() - before < 200


@pytest.mark.parametrize(
    "data",
    [
        bytes,
        lambda: b"no tensors",
        lambda: save({f"a{k}": torch.zeros(0) for k in range(20_000)}),
        lambda: save({"a": torch.zeros(1)}, {"more": "x" * 10_000}),
        lambda: save({"a": torch.zeros(1, dtype=torch.float8_e5m2)}),
        lambda: without_elements(2**63),
        lambda: without_elements(2**62, 2**62),
    ],
    ids=["empty", "text", "many", "more", "float8", "numbers", "strides"],
)
def test_data_that_is_not_a_part_is_refused(data: Callable[[], bytes]) -> None:
    with pytest.raises(WireError):
        separated(data())


def test_groups_of_many_small_tensors_can_be_read() -> None:
    """The header of all tensors would be too long for one part."""
    tensors = {f"blocks.{k}.{'x' * 100}": torch.zeros(1) for k in range(9000)}
    groups = grouped(tensors)
    assert [name for names in groups for name in names] == [*tensors]
    for names in groups:
        data = joined({name: tensors[name] for name in names}).numpy().tobytes()
        assert separated(data).keys() == {*names}
