"""Rows of unequal length as one tensor, and rows too long truncated."""

import logging
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def padded(sequences: Sequence[Sequence[int]], fill: int) -> Tensor:
    """int64 [rows, longest], ``fill`` behind what a row has."""
    width = max(map(len, sequences), default=0)
    rows = [[*ids, *[fill] * (width - len(ids))] for ids in sequences]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def mask_of(sequences: Sequence[Sequence[int]]) -> Tensor:
    """bool [rows, longest], True where ``padded`` puts no fill."""
    return padded([[1] * len(ids) for ids in sequences], 0).bool()


def truncate(
    sequences: Sequence[Sequence[_T]], room: int, max_length: int, what: str
) -> list[Sequence[_T]]:
    """Each row's first ``room`` items; the log says how many rows had more."""
    if longer := sum(len(row) > room for row in sequences):
        _log.warning(
            "%d of %d %s are longer than task.max_length=%d and were truncated",
            longer,
            len(sequences),
            what,
            max_length,
        )
    return [row[:room] for row in sequences]
