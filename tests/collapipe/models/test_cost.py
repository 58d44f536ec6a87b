"""The cost of a block, computed without its memory, equals the cost of real blocks of all
families."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from huggingface import ONE_OF_EACH, spec_of
from sections import optimizer_settings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from collapipe.devices.hardware import transformer_block_cost
from collapipe.errors import ConfigError
from collapipe.models import output_layer
from collapipe.models.cost import flop_counter, head_flops, measure_cost, upload_bits
from collapipe.models.dropout import drawing_from
from collapipe.models.lora import LoraSpec
from collapipe.models.part import Part
from collapipe.models.split import HEAD, Head, ModelSpec, SplitModel
from collapipe.models.transformer import TransformerSpec
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.text.vocabulary import Vocabulary
from collapipe.wire.compression.codec import FLOAT32

SPEC = TransformerSpec(
    num_blocks=3, num_decoder_blocks=1, dim=32, num_heads=4, feed_forward_dim=80, norm="post"
)
VOCABULARY = Vocabulary(size=70, pad=0, bos=1, eos=2)
LABELLED = replace(VOCABULARY, num_labels=3)
TOKENS = 7
OPTIMIZERS = {
    "adamw": optimizer_settings(),
    "sgd": optimizer_settings("sgd", momentum=0.9),
    "sgd-plain": optimizer_settings("sgd"),
}


@pytest.mark.parametrize(
    ("name", "head"), [case for case in ONE_OF_EACH if case.values[1] != "pooled"]
)
def test_the_cost_is_that_of_the_most_expensive_real_block(
    tmp_path: Path, name: str, head: str
) -> None:
    spec = spec_of(tmp_path, name, head)
    assert measure_cost(spec, TOKENS, 1) == dearest(spec, OPTIMIZERS["adamw"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_block_bytes_equal_those_of_a_real_training_step(tmp_path: Path, optimizer: str) -> None:
    settings, bases = OPTIMIZERS[optimizer], [SPEC]
    if optimizer == "adamw":  # the optimiser does not change what a family needs
        bases += spec_of(tmp_path, "t5", "decoder"), spec_of(tmp_path, "gpt2", "causal")
    for base in bases:
        for spec in (base, LoraSpec(base, rank=2)):
            real = dearest(spec, settings).block_bytes
            assert measure_cost(spec, TOKENS, 1, settings).block_bytes == real


def test_flops_and_bits_follow_from_the_block_sizes() -> None:
    tokens, dim = 12, SPEC.dim
    cost = measure_cost(SPEC, tokens, batch_size=5)
    by_size = transformer_block_cost(dim, SPEC.feed_forward_dim, tokens, 5)
    attention = 4 * tokens * tokens * dim
    assert cost.forward_flops == by_size.forward_flops
    # The fused kernel computes the scores once more.
    assert cost.backward_flops == by_size.backward_flops + attention / 2
    assert cost.activation_bits == cost.gradient_bits == tokens * dim * 32


def test_the_activations_of_t5_include_its_table_of_position_biases(tmp_path: Path) -> None:
    narrow = measure_cost(spec_of(tmp_path, "t5", "decoder"), TOKENS, 1)
    wide = measure_cost(spec_of(tmp_path, "t5-wide", "decoder"), TOKENS, 1)
    assert narrow.activation_bits == 32 * 16 * (TOKENS + 2)  # 10 buckets, 2 heads, 16 wide
    assert wide.activation_bits == 32 * 16 * (TOKENS + 4)


def test_memory_grows_linearly_with_the_number_of_samples() -> None:
    few, many = (measure_cost(SPEC, 12, batch_size).block_bytes for batch_size in (1, 11))
    weights = 4 * 4 * sum(p.numel() for p in SPEC.build_block(0).parameters())
    stash = (many - few) / 10
    assert few == weights + stash
    assert stash > 2 * 12 * SPEC.feed_forward_dim * 4  # both sides of the feed-forward's ReLU


def test_recomputing_keeps_inputs_and_the_activations_of_one_micro_batch() -> None:
    """The system model's §8: b inputs of a segment, and b/m samples' activations of each block."""
    whole, again = measure_cost(SPEC, 12, 10), measure_cost(SPEC, 12, 10, recompute=True)
    largest = max(p.numel() for p in SPEC.build_block(0).parameters()) * 4
    assert again.segment_bytes == 10 * 12 * SPEC.dim * 4 + largest
    assert again.block_bytes + 10 * again.sample_bytes == whole.block_bytes
    assert again.block_bytes == 4 * 4 * sum(p.numel() for p in SPEC.build_block(0).parameters())
    assert (again.forward_flops, again.backward_flops) == (
        whole.forward_flops,
        whole.backward_flops,
    )


@pytest.mark.parametrize(("name", "head"), [("ours", "decoder"), *ONE_OF_EACH])
def test_the_flops_of_a_head_equal_those_of_a_real_head(
    tmp_path: Path, name: str, head: str
) -> None:
    base = SPEC if name == "ours" else spec_of(tmp_path, name, head)
    for spec in (base, LoraSpec(base, rank=2)):
        assert head_flops(spec, LABELLED, TOKENS) == real_head_flops(spec)


@pytest.mark.parametrize("trains", [True, False])
def test_logits_computed_in_pieces_have_the_flops_of_one_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """The real head computes its logits in two pieces, and a bfloat16 weight in slices; the count
    uses one product."""
    base = spec_of(tmp_path, "llama", "causal")
    spec = base if trains else LoraSpec(base, rank=2, kept="bfloat16")
    sizes = {"_WHOLE": 0, "_PIECE": 4 * LABELLED.size, "_SLICE": 9 * spec.dim}
    for name, numbers in sizes.items():
        monkeypatch.setattr(output_layer, name, numbers)
    products, real = list[int](), torch.mm

    def product(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        products.append(len(left))
        return real(left, right, **options)

    monkeypatch.setattr(torch, "mm", product)
    counted, of_count = head_flops.__wrapped__(spec, LABELLED, TOKENS), len(products)
    assert counted == real_head_flops(spec)
    pieces = {4, TOKENS - 4}
    assert not pieces & {*products[:of_count]} and pieces <= {*products[of_count:]}


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SPEC.dim))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden * self.scale


@dataclass(frozen=True)
class WithoutProducts(TransformerSpec):
    def build_block(self, index: int) -> nn.Module:
        return Scaling()


def test_a_block_without_matrix_products_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model: a block computes no matrix product"):
        measure_cost(WithoutProducts(dim=SPEC.dim), 4, 1)


@dataclass(frozen=True)
class Returning(TransformerSpec):
    """A model whose block returns ``change(hidden)``."""

    change: Callable[[Tensor], object] = lambda hidden: hidden

    def build_block(self, index: int) -> nn.Module:
        block = super().build_block(index)
        block.register_forward_hook(lambda module, given, hidden: self.change(hidden))
        return block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hidden: (hidden, None), "returns tuple for an input torch.float32 [1, 4, 32]"),
        (lambda hidden: hidden[..., :9], "returns torch.float32 [1, 4, 9] for"),
        (lambda hidden: hidden[0], "returns torch.float32 [4, 32] for"),
        (lambda hidden: hidden > 0, "returns torch.bool [1, 4, 32] for"),
    ],
)
def test_a_block_with_an_output_unlike_its_input_is_refused(
    change: Callable[[Tensor], object], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        measure_cost(Returning(dim=SPEC.dim, num_heads=4, change=change), 4, 1)
    assert message in str(refused.value)


class OfTorch(TransformerSpec):
    """Blocks of torch's own class for two inputs, of another width."""

    def build_block(self, index: int) -> nn.Module:
        return nn.Bilinear(9, 4, self.dim)


def test_a_block_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a block cannot be computed .*; correct the"):
        measure_cost(OfTorch(dim=SPEC.dim, num_heads=4), 4, 1)


def test_counting_needs_no_memory() -> None:
    dim = 2**20  # its weights fit on no machine
    spec = TransformerSpec(num_blocks=2, dim=dim, num_heads=8, feed_forward_dim=dim)
    assert measure_cost(spec, 4, 1).block_bytes > 6 * 4 * 4 * dim**2
    assert head_flops(spec, VOCABULARY, 4) > 6 * 4 * 4 * dim**2


def test_counting_draws_nothing_from_the_global_generator(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_cost(SPEC, 4, 1)
    measure_cost(spec_of(tmp_path, "bert", "tokens"), 4, 1)
    head_flops(SPEC, VOCABULARY, 4)
    head_flops(spec_of(tmp_path, "bert", "tokens"), LABELLED, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_upload_bits_count_all_weights_outside_the_head() -> None:
    model = SplitModel(SPEC, VOCABULARY)
    numbers = sum(t.numel() for name, t in model.state_dict().items() if not name.startswith(HEAD))
    assert upload_bits(SPEC, VOCABULARY, FLOAT32) == 32 * numbers


def real_head_flops(spec: ModelSpec) -> float:
    """The head's FLOPs, counted while it computes with real weights and values."""
    head = cast(Head, spec.build_head(LABELLED).train())
    hidden = torch.randn(1, TOKENS, spec.dim, requires_grad=True)
    targets = torch.zeros(1, 1 if spec.head == "pooled" else TOKENS, dtype=torch.int64)
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    with flop_counter() as counter, drawing_from(torch.Generator()):
        head.loss(hidden, mask, targets).backward()
    return float(counter.get_total_flops())


def dearest(spec: ModelSpec, optimizer: OptimizerSettings) -> BlockCost:
    """The maximum of each cost over all blocks, measured in a real training step."""
    hidden, costs = torch.randn(1, TOKENS, spec.dim), []
    for index in range(spec.num_blocks):
        part = Part(f"blocks.{index}", spec.build_block(index), optimizer)
        hidden, cost = trained(part, hidden.detach().requires_grad_())
        costs.append(cost)
    figures = [field.name for field in fields(BlockCost)]
    return BlockCost(*(max(getattr(cost, name) for cost in costs) for name in figures))


def trained(part: Part, hidden: Tensor) -> tuple[Tensor, BlockCost]:
    """Train one block for a step; return its output and cost. The sample has padding, so masks
    count."""
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[0, -1] = False
    saved: list[Tensor] = []
    with (
        FlopCounterMode(display=False) as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        drawing_from(torch.Generator().manual_seed(0)),
    ):
        out = part.module(hidden, mask)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    with FlopCounterMode(display=False) as backward:
        out.backward(torch.ones_like(out))
    assert hidden.grad is not None
    own = [*part.module.parameters(), *part.module.buffers()]
    gradients = [weight.grad for weight in own if weight.grad is not None]
    stash = sum(sizes[place] for place in sizes.keys() - {t.data_ptr() for t in own})
    part.step(0.1, 1.0)
    moments = [t for name, t in part.optimizer_state().items() if not name.endswith("/step")]
    bits = 8.0 * out.nbytes
    total = stash + sum(tensor.nbytes for tensor in (*own, *gradients, *moments))
    flops = float(forward.get_total_flops()), float(backward.get_total_flops())
    return out, BlockCost(
        *flops,
        bits,
        bits,
        float(total),
        segment_bytes=float(max(tensor.nbytes for tensor in gradients)),  # a gradient to add
        batch_block_bytes=float(stash),
        trained_bytes=float(sum(tensor.nbytes for tensor in gradients)),
    )
