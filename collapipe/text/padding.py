"""Rows of unequal length as one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def padded(sequences: Sequence[Sequence[int]], fill: int) -> Tensor:
    """int64 [rows, longest], ``fill`` behind what a row has."""
    width = max(map(len, sequences), default=0)
    rows = [[*ids, *[fill] * (width - len(ids))] for ids in sequences]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def mask_of(sequences: Sequence[Sequence[int]]) -> Tensor:
    """bool [rows, longest], True where ``padded`` puts no fill."""
    return padded([[1] * len(ids) for ids in sequences], 0).bool()
