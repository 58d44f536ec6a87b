"""Batches of training pairs, and tensors by name: weights, states and gradients."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collapipe.errors import ConfigError

IGNORED = -100  # torch's own ignore_index: a target position that is padding
MOST_PACKED = 255  # sequences in a row, whose numbers are bytes
Tensors = dict[str, Tensor]
ALIGNMENT = 64  # bytes, as torch allocates


@dataclass(frozen=True, slots=True)
class Batch:
    """b samples, padded to a common length."""

    inputs: Tensor  # int64 [b, s], token ids; padding may hold any valid id
    # bool [b, s], True where ``inputs`` holds a token. If rows hold several sequences that do not
    # see each other: uint8 [b, s], the number of a token's sequence from 1, and 0 at padding.
    mask: Tensor
    targets: Tensor  # int64 [b, t], the values to predict; ``IGNORED`` at padding
    rows: Tensor | None = None  # int64 [b], samples' indices among the unit's rows; None: unknown

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for other forms, which a user's task may have made."""
        inputs, mask, targets = self.inputs, self.mask, self.targets
        matrices = inputs.dim() == targets.dim() == 2 and len(inputs) == len(targets)
        ids = inputs.dtype == targets.dtype == torch.int64
        if not (matrices and ids and is_mask(mask) and mask.shape == inputs.shape):
            described = (f"{each.dtype} {list(each.shape)}" for each in (inputs, mask, targets))
            raise ConfigError(
                f"task: a batch has inputs, mask and targets {', '.join(described)}; expected "
                "int64 [b, s], bool [b, s] and int64 [b, t]"
            )

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        rows = None if self.rows is None else self.rows.to(device)
        return Batch(self.inputs.to(device), self.mask.to(device), self.targets.to(device), rows)

    @property
    def num_samples(self) -> int:
        """b, the number of samples."""
        return int(self.inputs.shape[0])

    @property
    def num_inputs(self) -> int:
        """Number of input tokens, without padding."""
        return int(self.mask.bool().sum())

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


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor has the form of a batch's mask."""
    return tensor.dim() == 2 and tensor.dtype in (torch.bool, torch.uint8)


def chosen(tensors: Tensors, names: Collection[str]) -> Tensors:
    """Return the tensors with these names, in their original order."""
    return {name: tensor for name, tensor in tensors.items() if name in names}


def not_finite(tensors: Tensors) -> str | None:
    """Return the first name of a tensor with a NaN or infinite value, None if all are finite."""
    return next((name for name, tensor in tensors.items() if not all_finite(tensor)), None)


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass and without a copy."""
    if not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor))
    return bool(torch.isfinite(extremes).all())


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if it is not aligned to 64 bytes as torch's own are.

    The last bits of a matrix product depend on alignment. Tensors from messages or files are often
    not aligned. Narrow tensors compute in copies of a wider dtype, so they need no alignment.
    """
    if not tensor.data_ptr() % ALIGNMENT:
        return tensor
    computes = tensor.device.type == "cpu" and tensor.dtype.itemsize >= 4
    return tensor.clone() if computes else tensor
