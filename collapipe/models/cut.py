"""A model that is cut a second time: units hold its first blocks, the server the others."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from collapipe.errors import ConfigError
from collapipe.models.split import HEAD, DerivedSpec, Head, ModelSpec, through
from collapipe.models.stem import StemSpec
from collapipe.text.vocabulary import Vocabulary


def cut_at(spec: ModelSpec, cut: int | None) -> ModelSpec:
    """``spec`` with the blocks from ``cut`` on in its head; None: ``spec`` itself.

    Raises ``ConfigError`` where no block would be left for the server.
    """
    if cut is None:
        return spec
    if isinstance(spec, StemSpec):
        raise ConfigError(
            f"framework.cut={cut}: counts blocks that adapter.last_blocks={spec.num_blocks} may "
            "have frozen; set one of the two to null"
        )
    if cut >= spec.num_blocks:
        raise ConfigError(
            f"framework.cut={cut}: leaves none of model.num_blocks={spec.num_blocks} blocks to the "
            "server; lower framework.cut, or set it to null: then units hold all of them"
        )
    return CutSpec(spec, cut)


@dataclass(frozen=True)
class CutSpec(DerivedSpec):
    """A model of which the first ``num_blocks`` blocks are those of ``base``, and the head is the
    rest of it.

    Weights are drawn in the order of ``base``: the same seed gives the same ones. In the head they
    have the names that they have in ``base`` behind ``head.``: ``blocks.3.norm.weight`` is
    ``head.blocks.3.norm.weight`` and ``head.norm.weight`` is ``head.head.norm.weight``.
    """

    num_blocks: int

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        rest = range(self.num_blocks, self.base.num_blocks)
        blocks = {index: self.base.build_block(index) for index in rest}
        return CutHead(blocks, self.base.build_head(vocabulary))


class CutHead(nn.Module):
    """The blocks behind the cut, and the head behind them; a ``Head``.

    All of them draw their dropout from the head's generator, so that with dropout a run is not
    that of the uncut model.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.head = head

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Sum of the target tokens' losses; ``hidden`` as the units' last block leaves it."""
        return cast(Head, self.head).loss(self._encoded(hidden, mask), mask, targets)

    def logits(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return cast(Any, self.head).logits(self._encoded(hidden, mask), mask)  # type: ignore[no-any-return]

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return cast(Head, self.head).generate(self._encoded(hidden, mask), mask, max_length)

    def _encoded(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return through(self.blocks.values(), hidden, mask)


def uncut(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a ``CutSpec``'s model by their names in that of its ``base``."""
    return {name.removeprefix(f"{HEAD}."): weight for name, weight in weights.items()}


def extra_rows(spec: ModelSpec) -> int:
    """Rows that the units' last block puts behind those of the tokens, [b, s + rows, d].

    0 of a model that is not cut. T5's blocks hand on what they share; its last block, which takes
    that off, is behind the cut.
    """
    return rows_behind(spec, spec.num_blocks) if isinstance(spec, CutSpec) else 0


@functools.lru_cache(maxsize=8)  # every session of every round asks for it
def rows_behind(spec: ModelSpec, num_blocks: int) -> int:
    """The same of the first ``num_blocks`` blocks, found by a pass without memory."""
    with torch.device("meta"):
        blocks = [spec.build_block(index).eval() for index in range(num_blocks)]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        empty = [block.to_empty(device="cpu") for block in blocks]
        hidden, mask = torch.zeros(1, 1, spec.dim), torch.ones(1, 1, dtype=torch.bool)
        return int(through(empty, hidden, mask).shape[1]) - 1
