"""Weights in one byte or half of one: blocks of 64 consecutive weights, with a scale for each.

nf4 has 16 quantiles of the normal distribution as values (QLoRA, Dettmers et al. 2023). The library
bitsandbytes makes the same codes and weights. Importing it, or torchao, loads torch's compiler:
seconds, and more than 100 MB that a small device lacks.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

QUANTISED = "int8", "nf4"
FORMAT = 1  # of what ``quantise`` returns; another one makes stored weights again
BLOCK, _MOST = 64, 127  # weights with a scale, and the highest code of int8
_PIECE = 2**18  # weights that are restored at a time: they stay in a processor's cache
# made by NumPy, because torch's first operations take 7 MB, which an idle device does not need
_NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=np.float32,
)
_MIDDLES = torch.from_numpy((_NF4[1:] + _NF4[:-1]) / 2)
_OF_BYTES = np.stack((np.repeat(_NF4, 16), np.tile(_NF4, 16)), axis=1)
_PAIRS = torch.from_numpy(_OF_BYTES.view(np.int64).ravel())  # read twice as fast


def quantise(weight: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """Return codes and float32 scales. Codes of n weights are int8 [n], or uint8 [n / 2] with two
    of ``nf4`` in a byte; n is rounded up to whole blocks.

    The results are the same on all machines.
    """
    flat = weight.detach().float().flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    shares = blocks / scales.where(scales > 0, 1.0)
    if how == "int8":
        return (shares * _MOST).round().to(torch.int8).flatten(), scales.flatten()
    codes = torch.bucketize(shares, _MIDDLES.to(shares.device)).to(torch.uint8).flatten()
    return codes[::2] << 4 | codes[1::2], scales.flatten()


def restore(codes: Tensor, scales: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return the float32 weights [n] that ``quantise`` encoded, up to rounding.

    With ``memory``, flat float32, they are written to its beginning.
    """
    in_byte = 1 if codes.dtype == torch.int8 else 2
    count = len(codes) * in_byte
    weights = torch.empty(count, device=codes.device) if memory is None else memory[:count]
    factors = (scales / _MOST if in_byte == 1 else scales).float()
    size = _PIECE if codes.device.type == "cpu" else count
    pieces = zip(
        torch.split(weights, size),
        torch.split(codes, size // in_byte),
        torch.split(factors, size // BLOCK),
        strict=True,
    )
    for piece, own, factor in pieces:
        if in_byte == 1:
            piece.copy_(own)
        else:
            pairs = _PAIRS.to(codes.device)
            torch.index_select(pairs, 0, own.int(), out=piece.view(torch.int64))
        piece.view(-1, BLOCK).mul_(factor[:, None])
    return weights
