"""A frozen stem: the embedding and first blocks of a model, which never change.

A row's activation behind it depends on the row alone. Products of matrices round differently in
other shapes, so that a row computed beside others, or padded, may differ in the last bits. A stem
therefore computes each row by itself, without padding and without dropout: on one machine a row has
the same bits in whatever batch it stands, and whether it is computed or was kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from collapipe.models.activation_store import ActivationStore
from collapipe.models.split import (
    EMBEDDING,
    HEAD,
    DerivedSpec,
    MaskedEmbedding,
    block_name,
    through,
)
from collapipe.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class StemSpec(DerivedSpec):
    """``base``, whose embedding and first ``frozen_blocks`` blocks are one frozen embedding.

    Weights are drawn in the order of ``base``: the same seed gives the same ones. In the stem they
    have the names of ``base`` behind ``embedding.``, and other blocks count from 0; see
    ``without_stem``. What the stem computes is kept in ``store``, if there is one.
    """

    frozen_blocks: int
    store: ActivationStore | None = field(default=None, compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        """Blocks behind the stem."""
        return self.base.num_blocks - self.frozen_blocks

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        embedding = self.base.build_embedding(vocabulary)
        blocks = [self.base.build_block(index) for index in range(self.frozen_blocks)]
        return Stem(embedding, blocks, self.store)

    def build_block(self, index: int) -> nn.Module:
        return self.base.build_block(self.frozen_blocks + index)

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        return self.base.build_head(vocabulary)


class Stem(MaskedEmbedding):
    """Embedding and first blocks, each row by itself; never in training, never with a gradient."""

    def __init__(
        self,
        embedding: nn.Module,
        blocks: Sequence[nn.Module],
        store: ActivationStore | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self._store = embedding, nn.ModuleList(blocks), store
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Stem":
        """Stay without dropout, whatever the model around it does."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Hidden [b, s + r, d], zeros at padding; r rows are what T5's blocks hand on."""
        rows = [self._row(ids[real]) for ids, real in zip(inputs, mask, strict=True)]
        return _padded(rows, mask.sum(1).tolist(), mask.shape[1])

    def _row(self, ids: Tensor) -> Tensor:
        """What the last block makes of one row's tokens, [n + r, d]."""
        kept = self._store.load(ids) if self._store else None
        if kept is not None:
            return kept.to(ids.device)
        hidden, mask = self.embedding(ids[None]), torch.ones_like(ids[None], dtype=torch.bool)
        row = through(self.blocks, hidden, mask)[0]
        if self._store:
            self._store.keep(ids, row)
        return row


def _padded(rows: Sequence[Tensor], lengths: Sequence[int], width: int) -> Tensor:
    """[b, width + r, d]: each row's tokens, zeros, and its further rows at the end."""
    further = len(rows[0]) - lengths[0]
    hidden = rows[0].new_zeros(len(rows), width + further, rows[0].shape[1])
    for place, row, length in zip(hidden, rows, lengths, strict=True):
        place[:length], place[width:] = row[:length], row[length:]
    return hidden


def without_stem(weights: Mapping[str, Tensor], frozen_blocks: int) -> dict[str, Tensor]:
    """Weights of a ``StemSpec``'s model by their names in that of its ``base``."""
    return {_name_in_base(name, frozen_blocks): weight for name, weight in weights.items()}


def _name_in_base(name: str, frozen_blocks: int) -> str:
    part, _, rest = name.partition(".")
    if part == EMBEDDING:
        return rest
    if part == HEAD:
        return name
    index, _, rest = rest.partition(".")
    return f"{block_name(int(index) + frozen_blocks)}.{rest}"
