"""Interfaces of a model's three kinds of parts, and the unsplit model made of them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from collapipe.errors import ConfigError
from collapipe.formatting import counted
from collapipe.models.dropout import DropoutKey
from collapipe.models.weights.without_values import WithoutValues
from collapipe.tensors import IGNORED, Batch, Tensors, aligned
from collapipe.text.vocabulary import Vocabulary

M = TypeVar("M", bound=nn.Module)
EMBEDDING, HEAD = "embedding", "head"
TASKS = {  # kind of head → options of the tasks that train it
    "decoder": "task=dates or task=multi30k",
    "causal": "task=causal_lm or task=chat",
    "tokens": "task=ner",
    "pooled": "task=classification",
}


def block_name(index: int) -> str:
    """Return the name of an encoder block, which prefixes its weights' names."""
    return f"blocks.{index}"


class Head(Protocol):
    """The part after the last block: a decoder or a task head, with its output layer."""

    def loss(self, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of the target tokens; hidden [b, s, d], mask [b, s], targets
        [b, t]."""

    def generate(self, hidden: Tensor, mask: Tensor, max_length: int) -> list[list[int]]:
        """Return each sample's predicted token ids without special tokens."""


class ModelSpec(Protocol):
    """A model's configuration, which builds each kind of part with freshly drawn weights."""

    def __hash__(self) -> int:
        """Hash by value; measured costs are cached by it."""

    @property
    def num_blocks(self) -> int:
        """L, the number of encoder blocks."""

    @property
    def dim(self) -> int:
        """d, the width of the activations."""

    @property
    def head(self) -> str | None:
        """Kind of head: ``decoder``, ``causal``, ``tokens`` or ``pooled``."""

    @property
    def own_tokenizer(self) -> str | None:
        """Hub id or folder of the tokeniser that belongs to the pretrained weights."""

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        """Build the module that maps token ids [b, s] to hidden [b, s, d]."""

    def build_block(self, index: int) -> nn.Module:
        """Build block ``index``, counted from 0: (hidden [b, s, d], mask [b, s]) → hidden."""

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        """Build a module that implements ``Head``."""


class MaskedEmbedding(nn.Module):
    """An embedding that needs the padding mask: (inputs, mask) → hidden."""


def masks_for(embedding: nn.Module, mask: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments that ``embedding`` takes after its inputs."""
    return (mask,) if isinstance(embedding, MaskedEmbedding) else ()


def packs(spec: ModelSpec) -> bool:
    """Whether blocks and head accept masks of several sequences in a row; see ``Batch.mask``."""
    return bool(getattr(original(spec), "packs", False))


def table_rows(spec: ModelSpec) -> int:
    """Return the rows that the first block appends to a sample's tokens, and the last one removes;
    0 unless ``spec`` has the attribute."""
    return int(getattr(original(spec), "table_rows", 0))


def original(spec: ModelSpec) -> ModelSpec:
    """Return the model from which ``spec`` derives, without adapters, stem and cut."""
    while isinstance(spec, DerivedSpec):
        spec = spec.base
    return spec


@dataclass(frozen=True)
class DerivedSpec:
    """A model derived from ``base``: the properties that both share."""

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

    def name_in_base(self, name: str) -> str:
        """Return the name in ``base`` of a weight that both have."""
        return name

    def in_base(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Rename the weights of this model to their names in ``base``."""
        return {self.name_in_base(name): weight for name, weight in weights.items()}


def builders(spec: ModelSpec, vocabulary: Vocabulary) -> dict[str, Callable[[], nn.Module]]:
    """Return a function for each part that builds it, in the order in which weights are drawn."""
    blocks = {block_name(n): partial(spec.build_block, n) for n in range(spec.num_blocks)}
    embedding, head = (partial(f, vocabulary) for f in (spec.build_embedding, spec.build_head))
    return {EMBEDDING: embedding, **blocks, HEAD: head}


class SplitModel(nn.Module):
    """The unsplit model, for evaluation, prediction and unsplit training."""

    def __init__(self, spec: ModelSpec, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.dim = spec.dim
        self.embedding = spec.build_embedding(vocabulary)
        self.blocks = nn.ModuleList(map(spec.build_block, range(spec.num_blocks)))
        self.head = spec.build_head(vocabulary)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def parts(self) -> dict[str, nn.Module]:
        """Return name → module of the embedding, the blocks in order, and the head."""
        blocks = {block_name(index): block for index, block in enumerate(self.blocks)}
        return {EMBEDDING: self.embedding, **blocks, HEAD: self.head}

    def encode(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Return the last block's activation [b, s, d], without dropout."""
        hidden = self.embedding(inputs, *masks_for(self.embedding, mask))
        return through(self.blocks, hidden, mask)

    def loss(self, batch: Batch, key: DropoutKey) -> Tensor:
        """Return the summed loss of the target tokens, with the dropout masks of micro-batch 0."""
        with key.drawing(EMBEDDING, 0):
            hidden: Tensor = self.embedding(batch.inputs, *masks_for(self.embedding, batch.mask))
        for index, block in enumerate(self.blocks):
            with key.drawing(block_name(index), 0):
                hidden = block(hidden, batch.mask)
        with key.drawing(HEAD, 0):
            return summed_loss(self.head, hidden, batch.mask, batch.targets)

    @torch.inference_mode()
    def generate(self, batch: Batch, max_length: int) -> list[list[int]]:
        """Return greedy predictions for the batch's inputs."""
        hidden = self.encode(batch.inputs, batch.mask)
        return predictions(self.head, hidden, batch.mask, max_length)


def summed_loss(head: nn.Module, hidden: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a ``Head``. Raises ``ConfigError`` unless it is one number."""
    loss: object = cast(Head, head).loss(hidden, mask, targets)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    described = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    raise ConfigError(
        f"model: {type(head).__qualname__}.loss returned {described}, expected the sum over target "
        "tokens, a tensor of one number"
    )


def predictions(head: nn.Module, hidden: Tensor, mask: Tensor, length: int) -> list[list[int]]:
    """Return each sample's token ids, which a ``Head`` generates. Raises ``ConfigError`` unless
    there is a list for each sample."""
    found: object = cast(Head, head).generate(hidden, mask, length)
    if isinstance(found, Sized) and len(found) == len(mask):
        return cast(list[list[int]], found)
    described = counted(len(found), "row") if isinstance(found, Sized) else type(found).__name__
    raise ConfigError(
        f"model: {type(head).__qualname__}.generate returned {described}, expected a list of token "
        f"ids for each of {len(mask)} samples"
    )


def through(blocks: Iterable[nn.Module], hidden: Tensor, mask: Tensor) -> Tensor:
    """Apply ``blocks`` in order to ``hidden`` [b, s, d]."""
    for block in blocks:
        hidden = block(hidden, mask)
    return hidden


def shift_right(targets: Tensor, start: int, fill: int) -> Tensor:
    """Return a decoder's inputs [b, t]: ``start``, then ``targets`` without the last token."""
    before = targets.masked_fill(targets == IGNORED, fill)[:, :-1]
    return torch.cat((targets.new_full((len(targets), 1), start), before), 1)


def decode_greedily(
    next_logits: Callable[[Tensor, int], Tensor], mask: Tensor, start: int, end: int, length: int
) -> list[list[int]]:
    """Return each sample's token ids before ``end``, at most ``length`` of them.

    ``next_logits`` maps the last ids [b, 1] and their position to logits [b, vocabulary] and keeps
    its own cache of earlier positions.
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


@functools.lru_cache(maxsize=8)  # a unit asks for it in each round
def kinds_of_blocks(spec: ModelSpec, start: int = 0) -> tuple[int, ...]:
    """Return the first block from number ``start`` on of each set of weights: names, shapes, and
    whether they train."""
    first: dict[Any, int] = {}
    for index in range(start, spec.num_blocks):
        with WithoutValues():
            weights = spec.build_block(index).state_dict(keep_vars=True)
        kind = ((name, each.shape, each.requires_grad) for name, each in weights.items())
        first.setdefault(frozenset(kind), index)
    return tuple(first.values())


def frozen_names(spec: ModelSpec, vocabulary: Vocabulary) -> frozenset[str]:
    """Return the names in ``SplitModel``'s state of frozen weights and constants.

    Empty if every weight trains.
    """
    with WithoutValues():
        model = SplitModel(spec, vocabulary)
    if all(weight.requires_grad for weight in model.parameters()):
        return frozenset()
    return frozenset(not_training(model))


def not_training(module: nn.Module) -> set[str]:
    """Return the names of the frozen weights and constants in a module's state."""
    return module.state_dict().keys() - set(training_names(module))


def training_names(module: nn.Module) -> list[str]:
    """Return the names of the trainable weights."""
    return [name for name, each in module.named_parameters() if each.requires_grad]


def build_empty(build: Callable[[], M], weights: dict[str, Tensor]) -> M:
    """Build a module that holds ``weights`` themselves. Nothing is initialised, and only weights
    that are not aligned in memory are copied.

    Raises torch's ``RuntimeError`` if names or shapes do not match.
    """
    with WithoutValues():
        module = build()
    module.load_state_dict({name: aligned(each) for name, each in weights.items()}, assign=True)
    return module  # each weight keeps the requires_grad that it was built with
