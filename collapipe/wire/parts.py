"""A block's tensors as they travel and are stored: safetensors, made in one allocation."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.tensors import Tensors

_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
_PART_BYTES = 2**23  # so that neither end needs memory for a block beside it
_HEADER_BYTES = 2**20  # names and shapes, and more
NAME_BYTES = 512  # of the header for each tensor, and more


def grouped(tensors: Mapping[str, Tensor]) -> list[Sequence[str]]:
    """Names of tensors that travel together: few bytes, or one tensor; at least one group."""
    groups, size = [list[str]()], 0
    for name, each in tensors.items():
        if groups[-1] and size + each.nbytes > _PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += each.nbytes
    return list(groups)


def most_bytes(largest_tensor: int) -> int:
    """More than any group takes."""
    return max(_PART_BYTES, largest_tensor) + _HEADER_BYTES


def separated(data: bytes) -> Tensors:
    """The tensors of ``joined``. Raises ``WireError`` for what it never makes, such as a header of
    many tensors without values, which would take far more memory than they came with."""
    return _checked(data[:8], lambda: load(data))


def read_part(file: Path) -> Tensors:
    """As ``separated``, of a file, whose tensors take no memory before they are used."""
    with file.open("rb") as stream:
        return _checked(stream.read(8), lambda: load_file(file))


def _checked(size: bytes, read: Callable[[], Tensors]) -> Tensors:
    header = int.from_bytes(size, "little")
    try:
        tensors = read() if header <= _HEADER_BYTES else {}
    except (SafetensorError, KeyError) as error:  # a type that torch has not
        raise WireError(f"tensors cannot be read: {one_line(error)}") from error
    if header > NAME_BYTES * (1 + len(tensors)):
        raise WireError(f"a header of {header:,} bytes for {len(tensors)} tensors")
    return tensors


def joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of a safetensors file as uint8 [n].

    ``safetensors.torch.save`` makes three copies on the way, which is most of what a device that
    sends its blocks needs beside them. Raises ``KeyError`` for a dtype that no model has.
    """
    header, end = dict[str, object](), 0
    for name, each in tensors.items():
        offsets = end, end + each.nbytes
        header[name] = {
            "dtype": _CODES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    whole = torch.empty(len(head) + end, dtype=torch.uint8)
    whole[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    place = len(head)
    for each in tensors.values():
        raw = each.detach().contiguous().flatten().view(torch.uint8)
        whole[place : place + len(raw)] = raw
        place += len(raw)
    return whole
