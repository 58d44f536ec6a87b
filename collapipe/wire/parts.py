"""Named tensors as they travel and are stored: safetensors, made in one allocation."""

import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
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
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
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
    """The tensors of ``joined``, in its order.

    Raises ``WireError`` for what it never makes, such as a header of many tensors without values,
    which would take far more memory than they came with.
    """
    tensors = _checked(data[:8], lambda: load(data))  # in another order each time
    names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tensors[name] for name in names if name in tensors}


def read_part(file: Path) -> Tensors:
    """As ``separated``, of a file."""
    with file.open("rb") as stream:
        return _checked(stream.read(8), lambda: load_file(file, backend="pread"))


def mapped_part(file: Path) -> Tensors:
    """Tensors that ``read_part`` has found in order; they take no memory before they are used.

    safetensors maps files too, and loses two integers for each tensor of each (0.8)."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(size))
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)

    def tensor(dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> Tensor:
        count, offset = math.prod(shape), 8 + size + data_offsets[0]
        if count == 0:  # which torch finds in no buffer
            return torch.empty(*shape, dtype=_DTYPES[dtype])
        flat = torch.frombuffer(data, dtype=_DTYPES[dtype], count=count, offset=offset)
        return flat.reshape(shape)

    return {name: tensor(**each) for name, each in header.items()}


def _checked(size: bytes, read: Callable[[], Tensors]) -> Tensors:
    header = int.from_bytes(size, "little")
    try:
        tensors = read() if header <= _HEADER_BYTES else {}
    except (SafetensorError, KeyError) as error:  # a type that torch has not
        raise WireError(f"tensors cannot be read: {one_line(error)}") from error
    if header > NAME_BYTES * (1 + len(tensors)):
        raise WireError(f"a header of {header:,} bytes for {len(tensors)} tensors")
    for name, each in tensors.items():
        if each.dtype not in _CODES:
            raise WireError(f"tensor {name[:80]!r} of {each.dtype}, which nothing here has")
    return tensors


def joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """``joined_bytes`` as uint8 [n]."""
    return torch.frombuffer(bytearray().join(pieces(tensors)), dtype=torch.uint8)


def joined_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file.

    ``safetensors.torch.save`` makes three copies on the way, which is most of what a device that
    sends its blocks needs beside them. Raises ``KeyError`` for a dtype that no model has.
    """
    return b"".join(pieces(tensors))


def pieces(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """``joined_bytes``, not joined yet: a file takes them without a copy."""
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
    return [struct.pack("<Q", len(text)), text, *map(_raw, tensors.values())]


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().flatten()
    one_by_one = flat.as_strided((flat.numel(),), (1,))  # none or one may have another stride
    return one_by_one.view(torch.uint8).numpy().data
