"""Split learning's cut: units hold the first blocks of a model, the server holds the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from collapipe.errors import ConfigError
from collapipe.models.split import HEAD, DerivedSpec, Head, ModelSpec, table_rows, through
from collapipe.models.stem import StemSpec
from collapipe.text.vocabulary import Vocabulary


def cut_at(spec: ModelSpec, cut: int | None) -> ModelSpec:
    """Move the blocks from index ``cut`` on into the head of ``spec``; None returns ``spec``.

    Raises ``ConfigError`` if no block is left for the server.
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
            f"framework.cut={cut}: must be below model.num_blocks={spec.num_blocks}, so that the "
            "server has a block; lower it, or set it to null: then units have all blocks"
        )
    return CutSpec(spec, cut)


@dataclass(frozen=True)
class CutSpec(DerivedSpec):
    """Model with the first ``num_blocks`` blocks of ``base``; its head is the rest of ``base``.

    Weights are drawn in the order of ``base``, so the same seed gives the same weights. The head's
    weights have their names in ``base`` with the prefix ``head.``: ``blocks.3.norm.weight`` becomes
    ``head.blocks.3.norm.weight``, and ``head.norm.weight`` becomes ``head.head.norm.weight``.
    """

    num_blocks: int

    def name_in_base(self, name: str) -> str:
        return name.removeprefix(f"{HEAD}.")

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        rest = range(self.num_blocks, self.base.num_blocks)
        blocks = {index: self.base.build_block(index) for index in rest}
        return CutHead(blocks, self.base.build_head(vocabulary))


class CutHead(nn.Module):
    """The blocks after the cut and the original head; implements ``Head``.

    These blocks draw dropout from the head's generator, so with dropout a run of the cut model
    differs from a run of the uncut model.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.head = head

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of the target tokens; ``hidden`` is the units' last activation."""
        return cast(Head, self.head).loss(self._encoded(hidden, mask), mask, targets)

    @property
    def logits(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The head's ``logits``; missing, like any attribute, if the head has none."""
        own = cast(Any, self.head).logits
        return lambda hidden, mask: own(self._encoded(hidden, mask), mask)

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        return cast(Head, self.head).generate(self._encoded(hidden, mask), mask, max_length)

    def _encoded(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return through(self.blocks.values(), hidden, mask)


def without_cut(
    spec: ModelSpec, weights: Mapping[str, Tensor]
) -> tuple[ModelSpec, Mapping[str, Tensor]]:
    """Return the model without cut or stem, and the weights by their names in it."""
    if isinstance(spec, CutSpec | StemSpec):
        return spec.base, spec.in_base(weights)
    return spec, weights


def extra_rows(spec: ModelSpec) -> int:
    """Return how many rows the units' last block appends to the token rows: [b, s + rows, d].

    0 for a model without a cut. T5 blocks pass shared rows on to the next block; the block that
    removes them is on the server.
    """
    return table_rows(spec) if isinstance(spec, CutSpec) else 0
