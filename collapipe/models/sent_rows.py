"""Rows of an activation that are sent to a head on another machine: the rows that the head reads.

The other rows are not sent and no gradient is returned for them: the head uses zeros instead, and
their gradient is 0. Loss, gradients and weights have the same bits as if all rows were sent,
because unread rows affect the loss only through factors of exactly 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from collapipe.models.cut import CutSpec, extra_rows
from collapipe.models.split import ModelSpec
from collapipe.tensors import IGNORED

Reads = Literal["first", "labelled", "real", "every"]
"""Rows of a sample that a head reads: the first row, rows of labelled tokens, rows of all tokens
without padding, or every row."""

_OF_HEAD: dict[str | None, Reads] = {
    "pooled": "first",
    "tokens": "labelled",
    "causal": "real",
    "decoder": "real",
}


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Rows that a model's head reads; ``extra`` rows after the token rows are always sent."""

    reads: Reads
    extra: int = 0

    @classmethod
    def by(cls, spec: ModelSpec) -> "RowsRead":
        """Return the rows read by the head of ``spec``: all tokens if blocks follow a cut, every
        row if the kind of head is unknown."""
        reads = "real" if isinstance(spec, CutSpec) else _OF_HEAD.get(spec.head, "every")
        return cls(reads, extra_rows(spec))

    def of(self, mask: Tensor, targets: Tensor) -> Tensor:
        """Return [b, s + extra], True at rows to send; ``mask`` [b, s], ``targets`` [b, t]."""
        mask = mask.bool()
        read = torch.ones_like(mask)
        if self.reads == "first":
            read[:, 1:] = False
        elif self.reads == "real":
            read = mask
        elif self.reads == "labelled":
            labels = targets[:, : mask.shape[1]]
            read = torch.zeros_like(mask)
            read[:, : labels.shape[1]] = labels != IGNORED
        extra = torch.ones(len(mask), self.extra, dtype=torch.bool)
        return torch.cat([read, extra], dim=1)

    def most(self, lengths: Sequence[int]) -> int:
        """Return the largest number of rows sent for samples of these ``lengths`` in tokens."""
        count = len(lengths)
        tokens = {"first": count, "every": count * max(lengths)}.get(self.reads, sum(lengths))
        return tokens + count * self.extra


def scattered(rows: Tensor, read: Tensor) -> Tensor:
    """Put ``rows`` [n, d] where ``read`` is True, zeros elsewhere: [b, s + extra, d]."""
    whole = rows.new_zeros(*read.shape, rows.shape[-1])
    whole[read] = rows
    return whole
