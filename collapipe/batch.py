"""A batch of training pairs as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # torch's own ignore_index: a target position that is padding


@dataclass(frozen=True, slots=True)
class Batch:
    """b samples, padded to a common length.

    Attributes
    ----------
    inputs
        int64 [b, s], token ids; padding may hold any valid id.
    mask
        bool [b, s], True where ``inputs`` holds a token.
    targets
        int64 [b, t], the values to predict; ``IGNORED`` at padding.
    rows
        int64 [b], the samples' indices among the unit's rows; None: unknown.
    """

    inputs: Tensor
    mask: Tensor
    targets: Tensor
    rows: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        rows = None if self.rows is None else self.rows.to(device)
        return Batch(self.inputs.to(device), self.mask.to(device), self.targets.to(device), rows)

    @property
    def num_samples(self) -> int:
        """b, the number of samples."""
        return int(self.inputs.shape[0])

    @property
    def num_targets(self) -> int:
        """Number of target tokens, the divisor of the loss."""
        return int((self.targets != IGNORED).sum())


def padded(sequences: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Return int64 [rows, longest], with ``fill`` after each row's ids."""
    width = max(map(len, sequences), default=0)
    rows = [[*ids, *[fill] * (width - len(ids))] for ids in sequences]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def mask_of(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return bool [rows, longest], True where ``padded`` has ids and not fill."""
    return padded([[1] * len(ids) for ids in sequences], 0).bool()
