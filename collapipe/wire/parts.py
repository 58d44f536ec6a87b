"""Encode and decode named tensors as safetensors; encoding takes one allocation."""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from collapipe.errors import WireError, one_line
from collapipe.tensors import Tensors

_CODES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}
# errors for damaged data, also a type that torch lacks, and shapes without elements that are beyond
# its numbers
DAMAGED = (SafetensorError, KeyError, RuntimeError, TypeError)
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_ALIGNMENT = 8
_PART_BYTES = 2**23  # so that neither end needs memory for a second copy of a block
_HEADER_BYTES = 2**20  # generous bound of a header: names and shapes
MODEL_HEADER_BYTES = 2**23  # of one for the optimiser state of the deepest models
NAME_BYTES = 512  # generous bound of a tensor's entry in the header
_MOST_NAMES = _HEADER_BYTES // NAME_BYTES


def grouped(tensors: Mapping[str, Tensor]) -> list[Sequence[str]]:
    """Group the names of tensors to send together: at most 8 MiB each, or one tensor, and no more
    names than a header may have.

    Returns at least one group, which may be empty.
    """
    groups, size = [list[str]()], 0
    for name, each in tensors.items():
        full = size + each.nbytes > _PART_BYTES or len(groups[-1]) == _MOST_NAMES
        if groups[-1] and full:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += each.nbytes
    return list(groups)


def numbered(groups: Sequence[Sequence[str]]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield each group after the number of groups that follow it."""
    return zip(range(len(groups) - 1, -1, -1), groups, strict=True)


def most_bytes(largest_tensor: int) -> int:
    """Return an upper bound of an encoded group's size in bytes."""
    return max(_PART_BYTES, largest_tensor) + _HEADER_BYTES


def separated(data: bytes, most_header: int = _HEADER_BYTES) -> Tensors:
    """Return the tensors that ``joined`` encoded, in its order. Their names and shapes may have
    ``most_header`` bytes.

    Raises ``WireError`` for anything that ``joined`` never makes. An example is a header of many
    empty tensors, which would take far more memory than the message.
    """
    tensors = _checked(data[:8], most_header, lambda: load(data))  # in arbitrary order
    names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tensors[name] for name in names if name in tensors}


def read_part(file: Path) -> Tensors:
    """Read a file's tensors. Raises ``WireError`` as ``separated`` does."""
    with file.open("rb") as stream:
        read = partial(load_file, file, backend="pread")
        return _checked(stream.read(8), _HEADER_BYTES, read)


def mapped_part(file: Path) -> Tensors:
    """Map the tensors of a valid file; they take no memory before they are used.

    safetensors 0.8 can map files too, but leaks two integers for each tensor.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)

    def tensor(dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> Tensor:
        count, offset = math.prod(shape), 8 + size + data_offsets[0]
        if count == 0:  # torch.frombuffer refuses empty tensors
            return torch.empty(*shape, dtype=_DTYPES[dtype])
        flat = torch.frombuffer(data, dtype=_DTYPES[dtype], count=count, offset=offset)
        return flat.reshape(shape)

    return {name: tensor(**each) for name, each in header.items()}


def _checked(size: bytes, most_header: int, read: Callable[[], Tensors]) -> Tensors:
    if (header := int.from_bytes(size, "little")) > most_header:
        raise WireError(f"a header of {header:,} bytes, at most {most_header:,}")
    try:
        tensors = read()
    except DAMAGED as error:
        raise WireError(f"tensors cannot be read: {one_line(error)}") from error
    if header > NAME_BYTES * (1 + len(tensors)):
        raise WireError(f"a header of {header:,} bytes for {len(tensors)} tensors")
    for name, each in tensors.items():
        if each.dtype not in _CODES:
            raise WireError(f"tensor {name[:80]!r} of {each.dtype}, which nothing here has")
    return tensors


def joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of a safetensors file as a uint8 tensor [n]."""
    return torch.frombuffer(bytearray().join(pieces(tensors)), dtype=torch.uint8)


def pieces(tensors: Mapping[str, Tensor], alignment: int = _ALIGNMENT) -> list[bytes | memoryview]:
    """Return the pieces of a safetensors file, which can be written without a copy.

    ``safetensors.torch.save`` makes three copies, which would dominate the extra memory of a
    device that sends its blocks. The first tensor begins at a multiple of ``alignment`` bytes.
    Raises ``KeyError`` for a dtype that no model has.
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
    text += b" " * (-(8 + len(text)) % alignment)
    return [struct.pack("<Q", len(text)), text, *map(raw, tensors.values())]


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, which are not copied if they are in one piece on the CPU."""
    whole = tensor.detach().cpu().contiguous()
    if not whole.numel():
        return memoryview(b"")
    if whole.dtype is torch.bfloat16:  # numpy has none
        whole = whole.view(torch.int16)
    return whole.numpy().data.cast("B")
