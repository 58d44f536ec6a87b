"""A block's tensors as they travel and are stored: safetensors, made in one allocation."""

import json
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


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
