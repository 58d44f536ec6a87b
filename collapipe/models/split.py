"""The seam of a model: three kinds of parts, and their reunion, the unsplit model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from collapipe.batch import IGNORED, Batch
from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.text.vocabulary import Vocabulary

M = TypeVar("M", bound=nn.Module)
EMBEDDING, HEAD = "embedding", "head"
TASKS = {  # what trains each kind of head
    "decoder": "task=dates or task=multi30k",
    "causal": "task=causal_lm",
    "tokens": "task=ner",
    "pooled": "task=classification",
}


def block_name(index: int) -> str:
    """Name of an encoder block, also the prefix of its weights' names."""
    return f"blocks.{index}"


class Head(Protocol):
    """What stands behind the last block: a decoder or a task head with its output layer."""

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Sum of the target tokens' losses; hidden [b, s, d], mask [b, s], targets [b, t]."""

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """Predicted ids of each sample, without special tokens."""


class ModelSpec(Protocol):
    """A model's configuration; builds each kind of part with fresh weights."""

    def __hash__(self) -> int:
        """Hash by value; measured costs are cached by it."""

    @property
    def num_blocks(self) -> int:
        """L."""

    @property
    def dim(self) -> int:
        """d, the width of the activations."""

    @property
    def head(self) -> str | None:
        """What stands behind the blocks: ``decoder``, ``causal``, ``tokens`` or ``pooled``."""

    @property
    def own_tokenizer(self) -> str | None:
        """Hub id or folder with the tokeniser that the first weights were trained with."""

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        """inputs [b, s] → hidden [b, s, d]."""

    def build_block(self, index: int) -> nn.Module:
        """Block ``index``, from 0: (hidden [b, s, d], mask [b, s]) → hidden [b, s, d]."""

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        """A module that is a ``Head``."""


class MaskedEmbedding(nn.Module):
    """An embedding that must know what of its inputs is padding: (inputs, mask) → hidden."""


def masks_for(embedding: nn.Module, mask: Tensor) -> tuple[Tensor, ...]:
    """What ``embedding`` is called with behind its inputs."""
    return (mask,) if isinstance(embedding, MaskedEmbedding) else ()


@dataclass(frozen=True)
class DerivedSpec:
    """What a model made out of another one, ``base``, has in common with it."""

    base: ModelSpec

    @property
    def dim(self) -> int:
        return self.base.dim

    @property
    def head(self) -> str | None:
        return self.base.head

    @property
    def own_tokenizer(self) -> str | None:
        return self.base.own_tokenizer

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return self.base.build_embedding(vocabulary)

    def build_block(self, index: int) -> nn.Module:
        return self.base.build_block(index)


class SplitModel(nn.Module):
    """All parts in one place: for evaluation, prediction and unsplit training."""

    def __init__(self, spec: ModelSpec, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.embedding = spec.build_embedding(vocabulary)
        self.blocks = nn.ModuleList(map(spec.build_block, range(spec.num_blocks)))
        self.head = spec.build_head(vocabulary)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    def parts(self) -> dict[str, nn.Module]:
        """Embedding, blocks in order, head: name → module."""
        blocks = {block_name(index): block for index, block in enumerate(self.blocks)}
        return {EMBEDDING: self.embedding, **blocks, HEAD: self.head}

    def encode(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """The last block's activation [b, s, d], without dropout."""
        hidden = self.embedding(inputs, *masks_for(self.embedding, mask))
        return through(self.blocks, hidden, mask)

    def loss(self, batch: Batch, key: DropoutKey) -> Tensor:
        """Sum of the target tokens' losses in one piece, with the dropout of micro-batch 0."""
        with drawing_from(key.generator(EMBEDDING, 0)):
            masks = masks_for(self.embedding, batch.mask)
            hidden: Tensor = self.embedding(batch.inputs, *masks)
        for index, block in enumerate(self.blocks):
            with drawing_from(key.generator(block_name(index), 0)):
                hidden = block(hidden, batch.mask)
        with drawing_from(key.generator(HEAD, 0)):
            return cast(Head, self.head).loss(hidden, batch.mask, batch.targets)

    @torch.inference_mode()
    def generate(self, batch: Batch, max_length: int) -> list[list[int]]:
        """Greedy predictions for the batch's inputs."""
        hidden = self.encode(batch.inputs, batch.mask)
        return cast(Head, self.head).generate(hidden, batch.mask, max_length)


def through(blocks: Iterable[nn.Module], hidden: Tensor, mask: Tensor) -> Tensor:
    """What the last of ``blocks`` makes of ``hidden`` [b, s, d]."""
    for block in blocks:
        hidden = block(hidden, mask)
    return hidden


def shift_right(targets: Tensor, start: int, fill: int) -> Tensor:
    """A decoder's inputs [b, t]: ``start``, then all of ``targets`` but the last."""
    before = targets.masked_fill(targets == IGNORED, fill)[:, :-1]
    return torch.cat((targets.new_full((len(targets), 1), start), before), 1)


def decode_greedily(
    next_logits: Callable[[Tensor, int], Tensor], mask: Tensor, start: int, end: int, length: int
) -> list[list[int]]:
    """Ids of a batch's samples, up to ``end`` and ``length`` at most.

    ``next_logits`` takes the last ids [b, 1] and their position, gives [b, vocabulary] and keeps
    what it needs of the past.
    """
    ids = mask.new_full((len(mask), 1), start, dtype=torch.long)
    done = mask.new_zeros(len(mask), dtype=torch.bool)
    for position in range(length):
        following = next_logits(ids[:, -1:], position).argmax(-1).masked_fill(done, end)
        ids = torch.cat((ids, following[:, None]), 1)
        done |= following == end
        if bool(done.all()):
            break
    return [list(takewhile(end.__ne__, row)) for row in ids[:, 1:].tolist()]


def frozen_names(spec: ModelSpec, vocabulary: Vocabulary) -> frozenset[str]:
    """Names, as in ``SplitModel``'s state, of what does not train beside adapters, constants in the
    state among it; empty where every weight trains."""
    with torch.device("meta"):
        model = SplitModel(spec, vocabulary)
    if all(weight.requires_grad for weight in model.parameters()):
        return frozenset()
    return frozenset(not_training(model))


def not_training(module: nn.Module) -> set[str]:
    """Names of the frozen weights and constants in a module's state."""
    return module.state_dict().keys() - set(training_names(module))


def training_names(module: nn.Module) -> list[str]:
    """Names of the weights that train."""
    return [name for name, each in module.named_parameters() if each.requires_grad]


def build_empty(build: Callable[[], M], weights: dict[str, Tensor]) -> M:
    """A module around ``weights`` themselves: nothing is initialised, nothing copied.

    Raises ``RuntimeError`` (torch's) where names or shapes do not fit.
    """
    with torch.device("meta"):
        module = build()
    module.load_state_dict(weights, assign=True)
    return module  # what is frozen stays so: each weight keeps the requires_grad it was built with
