"""FLOPs, bytes and bits of an encoder block, counted on fake tensors of the block itself."""

import functools
from collections.abc import Iterable
from dataclasses import astuple, replace
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from collapipe.errors import ConfigError, one_line
from collapipe.models.dropout import drawing_from
from collapipe.models.output_layer import in_one_piece
from collapipe.models.part import moments, state_like
from collapipe.models.split import Head, ModelSpec, kinds_of_blocks, table_rows
from collapipe.models.stem import StemSpec
from collapipe.models.weights.kept import Widened, widest_bytes
from collapipe.models.weights.without_values import WithoutValues
from collapipe.own_packages import error_of_plugin
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression.codec import FLOAT32, num_bytes

_FLOAT_BITS = 32
_ADAMW = 2  # moments of a weight
_aten = torch.ops.aten
_ATTENTION = {  # the CPU's fused kernel, which torch's own table of FLOPs lacks
    _aten._scaled_dot_product_flash_attention_for_cpu: unwrap(sdpa_flop),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: unwrap(sdpa_backward_flop),
}
flop_counter = functools.partial(FlopCounterMode, display=False, custom_mapping=_ATTENTION)


def get_ready() -> None:
    """Import what the first count needs: torch's compiler with 800 modules, half the time of a
    unit's first reply if they are imported then."""
    FakeTensorMode()


def rows_of_input(spec: ModelSpec, tokens: int) -> int:
    """Return the rows of the first block's input for a sample of ``tokens`` tokens, with the rows
    that a frozen stem appends."""
    if isinstance(spec, StemSpec) and spec.frozen_blocks:
        return tokens + table_rows(spec)
    return tokens


def measure_cost(
    spec: ModelSpec,
    tokens: int,
    batch_size: int,
    optimizer: OptimizerSettings | None = None,
    recompute: bool = False,
) -> BlockCost:
    """Return the cost of the most expensive block for samples of ``tokens`` tokens, in float32.

    Planners treat all blocks as equal, but a model may have several kinds: blocks with and without
    experts, or T5's first block, which also holds the table of positions for the others. Each
    figure is therefore the largest one of all kinds. A token costs the experts that compute it.

    FLOPs count the matrix products, attention included, of one sample's forward and backward pass.
    Bytes are weights, gradients and optimiser moments (AdamW's without ``optimizer``) plus the
    tensors that autograd saves for all ``batch_size`` samples; planners count the part that the
    schedule keeps at the same time. A segment also needs a weight once more: the largest gradient
    before it is added to the earlier micro-batches', or the largest frozen weight if it is kept
    narrow and widened to compute. With ``recompute`` saved tensors count for one
    micro-batch and inputs for the whole batch; FLOPs do not change. Raises ``ConfigError`` for a
    block without FLOPs.
    """
    kinds = _kinds(spec, tokens, optimizer)
    if not all(cost.flops for cost in kinds):
        raise ConfigError(
            "model: a block computes no matrix product, by which planners estimate its time; add "
            "one, or merge the block with another"
        )
    costs = [astuple(_keeping(cost, batch_size, recompute)) for cost in kinds]
    return BlockCost(*map(max, zip(*costs, strict=True)))


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def _kinds(
    spec: ModelSpec, tokens: int, optimizer: OptimizerSettings | None
) -> tuple[BlockCost, ...]:
    """Return the cost of each kind of block, without what is kept for a batch."""
    shape, costs = torch.Size((1, rows_of_input(spec, tokens), spec.dim)), []
    for index in kinds_of_blocks(spec):
        with WithoutValues():
            block = spec.build_block(index)
        with FakeTensorMode(allow_non_fake_inputs=True), _AllRows():  # type: ignore[no-untyped-call]
            shape, cost = _measure(block, shape, tokens, optimizer)
        costs.append(cost)
    return tuple(costs)


def _keeping(cost: BlockCost, batch_size: int, recompute: bool) -> BlockCost:
    """Add the memory of a whole batch: saved tensors, or with ``recompute`` the inputs alone."""
    if recompute:
        kept = batch_size * cost.activation_bits / 8
        return replace(cost, segment_bytes=cost.segment_bytes + kept, batch_segment_bytes=kept)
    kept = batch_size * cost.sample_bytes
    return replace(
        cost, block_bytes=cost.block_bytes + kept, sample_bytes=0.0, batch_block_bytes=kept
    )


def _measure(
    block: nn.Module, shape: torch.Size, tokens: int, optimizer: OptimizerSettings | None
) -> tuple[torch.Size, BlockCost]:
    """Return the shape of the block's output, and its cost for a sample of ``shape``."""
    block = block.train().to_empty(device="cpu")
    hidden = torch.zeros(shape, requires_grad=True)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Widened):  # stands for a weight
            saved.append(tensor)
        return tensor

    with (
        flop_counter() as forward,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        drawing_from(torch.Generator()),
    ):
        out = _output(block, hidden, mask)
    if not out.requires_grad:
        raise ConfigError(
            f"model: the output of a {type(block).__qualname__} has no gradient for its input; "
            "remove what detaches it, such as torch.no_grad()"
        )
    with flop_counter() as backward:
        torch.autograd.backward(out, torch.ones_like(out))
    own = _storages([*block.parameters(), *block.buffers()])
    stash = sum((own | _storages(saved)).values()) - sum(own.values())
    gradients = [weight.nbytes for weight in block.parameters() if weight.requires_grad]
    trained = sum(gradients)
    count = _ADAMW if optimizer is None else len(moments(optimizer))
    cost = BlockCost(
        forward_flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        activation_bits=float(out.numel() * _FLOAT_BITS),
        gradient_bits=float(out.numel() * _FLOAT_BITS),
        block_bytes=float(sum(own.values()) + (1 + count) * trained),
        sample_bytes=float(stash),
        segment_bytes=float(max(widest_bytes(block), *gradients, 0)),
        trained_bytes=float(trained),
    )
    return out.shape, cost


def _output(block: nn.Module, hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the block's output for ``hidden`` [b, s, d]; it may append rows to a sample. Raises
    ``ConfigError`` if there is none, or of another form."""
    try:
        out: object = block(hidden, mask)
    except RuntimeError as error:
        if error_of_plugin(error) is not None:  # has its file and line
            raise
        raise ConfigError(
            f"model: a block cannot be computed ({one_line(error)}); correct the model's options"
        ) from error
    described = type(out).__name__
    if isinstance(out, Tensor):
        fits = out.dim() == 3 and out.shape[::2] == hidden.shape[::2]
        if out.is_floating_point() and fits:
            return out
        described = f"{out.dtype} {list(out.shape)}"
    raise ConfigError(
        f"model: a block returns {described} for an input {hidden.dtype} {list(hidden.shape)}; it "
        "must return numbers of the same batch and width"
    )


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def head_flops(spec: ModelSpec, vocabulary: Vocabulary, tokens: int) -> float:
    """Return the head's FLOPs for a sample of ``tokens`` tokens and as many targets.

    Counted as in ``measure_cost``.
    """
    with WithoutValues():
        head = spec.build_head(vocabulary).train()
    with FakeTensorMode(allow_non_fake_inputs=True), _AllRows():  # type: ignore[no-untyped-call]
        head = head.to_empty(device="cpu")
        hidden = torch.zeros(1, tokens, spec.dim, requires_grad=True)
        mask = torch.ones(1, tokens, dtype=torch.bool)
        targets = torch.zeros(1, 1 if spec.head == "pooled" else tokens, dtype=torch.int64)
        with flop_counter() as counter, drawing_from(torch.Generator()), in_one_piece():
            cast(Head, head).loss(hidden, mask, targets).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


class _AllRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace reads of values, which fake tensors lack: masks select all rows, scalars are 0, and
    the first expert computes every token, once for each of the token's experts."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default:
            return 0
        if func is _aten.index.Tensor:
            picked, (mask, *_) = args
            if mask is not None and mask.dtype == torch.bool:
                return picked.flatten(0, mask.dim() - 1)
        if func is _aten.nonzero.default:  # the experts that have tokens, or the tokens of one
            rows = args[0].numel() if args[0].dim() > 1 else 1
            return torch.zeros(rows, args[0].dim(), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def end_bytes(spec: ModelSpec, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the bytes of embedding and head: weights, gradients and AdamW's moments."""
    with WithoutValues():
        parts = spec.build_embedding(vocabulary), spec.build_head(vocabulary)
    copies = 1, 2 + _ADAMW  # of a frozen weight, and of one that trains
    return tuple(sum(w.nbytes * copies[w.requires_grad] for w in p.parameters()) for p in parts)


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def head_state_bits(
    spec: ModelSpec, vocabulary: Vocabulary, optimizer: OptimizerSettings, dtype: torch.dtype
) -> float:
    """Return the size in bits of the head's optimiser state; the head computes in ``dtype``."""
    with WithoutValues():
        weights = spec.build_head(vocabulary).to(dtype).named_parameters()
    trained = {name: weight for name, weight in weights if weight.requires_grad}
    return 8.0 * sum(each.nbytes for each in state_like(optimizer, trained).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Map the identity of each distinct storage to its bytes; fake tensors have no address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


@functools.lru_cache(maxsize=8)  # every unit of a process asks for it
def upload_bits(
    spec: ModelSpec,
    vocabulary: Vocabulary,
    precision: str = FLOAT32,
    dtype: torch.dtype = torch.float32,
    with_head: bool = False,
) -> float:
    """Return θ^enc, the bits that a unit uploads after a round.

    These are the trainable weights of embedding and blocks in the ``precision`` of
    ``compression.upload``; ``with_head`` adds the head's weights. The model computes in ``dtype``.
    """
    with WithoutValues():
        parts = [spec.build_embedding(vocabulary), *map(spec.build_block, range(spec.num_blocks))]
        parts += [spec.build_head(vocabulary)] if with_head else []
    state = [weight for part in parts for weight in part.state_dict(keep_vars=True).values()]
    sent = [w for w in state if w.requires_grad or not isinstance(w, nn.Parameter)]
    return 8.0 * sum(
        num_bytes(w.shape, dtype if w.is_floating_point() else w.dtype, precision) for w in sent
    )
