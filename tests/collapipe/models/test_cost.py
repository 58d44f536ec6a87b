"""A block's cost is counted on the block: against the formulas of a Transformer's sizes."""

import torch

from collapipe.models.cost import measure_cost, upload_bits
from collapipe.models.split import HEAD, SplitModel
from collapipe.models.transformer import TransformerSpec
from collapipe.tasks.tokenizer import Vocabulary

SPEC = TransformerSpec(
    num_blocks=3, num_decoder_blocks=1, dim=32, num_heads=4, feed_forward_dim=80, norm="post"
)
VOCABULARY = Vocabulary(size=70, pad=0, bos=1, eos=2)


def test_flops_and_bits_are_those_of_the_sizes() -> None:
    tokens, dim, hidden = 12, SPEC.dim, SPEC.feed_forward_dim
    cost = measure_cost(SPEC, tokens, batch_size=5)
    linear = 2 * tokens * (4 * dim * dim + 2 * dim * hidden)
    assert cost.forward_flops == linear
    assert cost.backward_flops == 2 * linear
    assert cost.activation_bits == cost.gradient_bits == tokens * dim * 32


def test_memory_grows_with_what_is_kept_for_each_sample() -> None:
    few, many = (measure_cost(SPEC, 12, batch_size).block_bytes for batch_size in (1, 11))
    weights = 4 * 4 * sum(p.numel() for p in SPEC.build_block(0).parameters())
    stash = (many - few) / 10
    assert few == weights + stash
    assert stash > 2 * 12 * SPEC.feed_forward_dim * 4  # both sides of the feed-forward's ReLU


def test_counting_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    measure_cost(SPEC, 4, 1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_upload_is_what_a_unit_returns() -> None:
    model = SplitModel(SPEC, VOCABULARY)
    numbers = sum(t.numel() for name, t in model.state_dict().items() if not name.startswith(HEAD))
    assert upload_bits(SPEC, VOCABULARY) == 32 * numbers
