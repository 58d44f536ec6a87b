"""Which rows of an activation travel to a head on another machine: those that it reads.

The others are neither sent nor answered: the head computes with zeros in their place, and their
gradient is 0. Loss, gradients and weights are the same bits as if all had been sent, since what a
head does not read reaches the loss through factors of exactly 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from collapipe.batch import IGNORED
from collapipe.models.cut import CutSpec, extra_rows
from collapipe.models.split import ModelSpec

Reads = Literal["first", "labelled", "real", "every"]
"""A head's rows of a sample: its first, those of tokens with a label, of all tokens without their
padding, or every one."""

_OF_HEAD: dict[str | None, Reads] = {
    "pooled": "first",
    "tokens": "labelled",
    "causal": "real",
    "decoder": "real",
}


@dataclass(frozen=True, slots=True)
class RowsRead:
    """What the head of a model reads, and how many rows are behind the tokens' in any case."""

    reads: Reads
    extra: int = 0

    @classmethod
    def by(cls, spec: ModelSpec) -> "RowsRead":
        """The head of ``spec``. Blocks behind a cut attend to all tokens; of a head of an unknown
        kind nothing is known."""
        reads = "real" if isinstance(spec, CutSpec) else _OF_HEAD.get(spec.head, "every")
        return cls(reads, extra_rows(spec))

    def of(self, mask: Tensor, targets: Tensor) -> Tensor:
        """True at each row that travels, [b, s + extra]; ``mask`` [b, s], ``targets`` [b, t]."""
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
        """Rows that travel of samples of these ``lengths``, all together, at most."""
        count = len(lengths)
        tokens = {"first": count, "every": count * max(lengths)}.get(self.reads, sum(lengths))
        return tokens + count * self.extra


def scattered(rows: Tensor, read: Tensor) -> Tensor:
    """Rows [n, d] in their places, zeros in the others, [b, s + extra, d]."""
    whole = rows.new_zeros(*read.shape, rows.shape[-1])
    whole[read] = rows
    return whole
