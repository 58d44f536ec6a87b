"""A frozen stem: the embedding and first blocks of a model, which never train.

The activation of a row depends on that row alone. Matrix products round differently for different
shapes, so a row computed in a batch or with padding may differ in its last bits. A stem therefore
computes each row separately, without padding and without dropout. On one machine a row then has the
same bits in every batch, whether it is computed or read from the cache.
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
    """Model that treats the embedding and first ``frozen_blocks`` blocks of ``base`` as embedding.

    Weights are drawn in the order of ``base``, so the same seed gives the same weights. The stem's
    weights have the names of ``base`` with the prefix ``embedding.``; the remaining blocks are
    numbered from 0 (``without_stem`` restores the names). ``store`` caches the stem's activations.
    """

    frozen_blocks: int
    store: ActivationStore | None = field(default=None, compare=False, repr=False)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that follow the stem."""
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
    """Embedding and first blocks, applied row by row in evaluation mode and without gradients."""

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
        """Stay in evaluation mode, so that no dropout is applied."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states [b, s + r, d], zero at padding; T5 blocks append r shared rows."""
        rows = [self._row(ids[real]) for ids, real in zip(inputs, mask, strict=True)]
        return _padded(rows, mask.sum(1).tolist(), mask.shape[1])

    def _row(self, ids: Tensor) -> Tensor:
        """Return the last block's output [n + r, d] for the n tokens of one row."""
        kept = self._store.load(ids) if self._store else None
        if kept is not None:
            return kept.to(ids.device)
        hidden, mask = self.embedding(ids[None]), torch.ones_like(ids[None], dtype=torch.bool)
        row = through(self.blocks, hidden, mask)[0]
        if self._store:
            self._store.keep(ids, row)
        return row


def _padded(rows: Sequence[Tensor], lengths: Sequence[int], width: int) -> Tensor:
    """Stack rows to [b, width + r, d]: a row's tokens, zeros, then its r shared rows."""
    further = len(rows[0]) - lengths[0]
    hidden = rows[0].new_zeros(len(rows), width + further, rows[0].shape[1])
    for place, row, length in zip(hidden, rows, lengths, strict=True):
        place[:length], place[width:] = row[:length], row[length:]
    return hidden


def without_stem(weights: Mapping[str, Tensor], frozen_blocks: int) -> dict[str, Tensor]:
    """Rename the weights of a ``StemSpec``'s model to their names in ``base``."""
    return {_name_in_base(name, frozen_blocks): weight for name, weight in weights.items()}


def _name_in_base(name: str, frozen_blocks: int) -> str:
    part, _, rest = name.partition(".")
    if part == EMBEDDING:
        return rest
    if part == HEAD:
        return name
    index, _, rest = rest.partition(".")
    return f"{block_name(int(index) + frozen_blocks)}.{rest}"
