"""Decoder-only families: a tiny model in parts has the loss and gradients of the whole model."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from huggingface import VOCABULARY, batch_for
from narrow import kept, rounded
from thorough import chosen
from torch.nn import functional

from collapipe.errors import ConfigError
from collapipe.models import dropout, output_layer
from collapipe.models.cost import flop_counter, head_flops, measure_cost
from collapipe.models.dropout import DropoutKey
from collapipe.models.frozen import frozen_in, published
from collapipe.models.huggingface import weights
from collapipe.models.huggingface.families import DECODERS
from collapipe.models.huggingface.skeleton import _constants_as_buffers
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.models.split import Head, ModelSpec, SplitModel
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.wire.frozen_store import digest

PAGE = Path(__file__).parents[3] / "docs/how-to/huggingface.md"
LAYERS, TOKENS = 4, 7
LLAMA = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
SIZES: dict[str, Any] = {  # each family uses the fields that its configuration has
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "sliding_window": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "num_experts_per_tok": 2,
    # linear attention
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    **dict.fromkeys(("linear_head_dim", "linear_num_heads", "mamba_d_state", "mamba_dt_rank"), 4),
    # latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    # layers of several kinds
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    # scales that a model applies once
    "embedding_multiplier": 3.0,
    "mup_enabled": True,
    "logits_scaling": 2.0,
    "logit_scale": 0.5,
    "final_logit_softcapping": 2.0,
}
KINDS = {("lfm2_moe", "layer_types"): ("conv", "full_attention")}  # not configured
# FEW: the families that our code names, and one for each kind of attention, experts, norms and
# scales.
# COUNTED: one for each kind of experts or attention. `make test-thorough` runs all families.
# OLMo's last norm has no weights.
FEW = "afmoe aria_text beam cohere deepseek_v3 deepseek_v32 diffllama doge ernie4_5_moe flint"
FEW += " gemma2 gemma3_text glm4 gpt_neox gpt_oss granite jamba lfm2_moe llama minicpm3 minimax"
FEW += " mistral mixtral nemotron olmo2 phi phi3 qwen3 qwen3_5_text stablelm starcoder2 youtu"
COUNTED = "aria_text", "beam", "deepseek_v32", "gpt_oss", "mixtral", "qwen3_5_text"
# transformers has no fused attention for them: capped logits, attention sinks
KEEPING = {"gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "stablelm", "vaultgemma"}
# torch's fused kernels do not fit: trained masks, or values and keys of different widths
KEEPING |= {"doge", "minicpm3", "youtu", "glm4_moe_lite", "bailing_hybrid", "kimi_linear"}
KEEPING |= {"axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"}


def tiny(family: str, folder: Path, num_blocks: int = 2) -> HuggingFaceSpec:
    """A model of four layers, in which the family's kinds of layers alternate."""
    default = transformers.CONFIG_MAPPING[family]()
    known = default.to_dict().keys() | default.attribute_map
    tree = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in tree:
        tree["num_key_value_heads"] = tree["num_attention_heads"]
    tree |= {name: 0.0 for name in default.to_dict() if "drop" in name}
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := default.to_dict().get(name, ()) or KINDS.get((family, name)):
            tree[name] = [*islice(cycle(dict.fromkeys(kinds)), LAYERS)]
    config = {"model_type": family, "vocab_size": VOCABULARY.size, **tree}
    (folder / "config.json").write_text(json.dumps(config))
    return HuggingFaceSpec(str(folder), num_blocks=num_blocks, head="causal")


def by_default(families: Sequence[str]) -> list[Any]:
    """All families as parameters; those not in ``families`` only run in thorough tests."""
    return [
        pytest.param(each, marks=() if each in families else pytest.mark.thorough)
        for each in DECODERS
    ]


def passed(model: SplitModel) -> list[torch.Tensor]:
    """The loss, and each part's input with its gradient."""
    batch = batch_for("causal")
    read = [model.embedding(batch.inputs).requires_grad_()]
    for block in model.blocks:
        read.append(block(read[-1], batch.mask))
        read[-1].retain_grad()
    loss: torch.Tensor = cast(Head, model.head).loss(read[-1], batch.mask, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None and each.grad.any() for each in read)
    return [loss, *read, *(each.grad for each in read if each.grad is not None)]


def gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            yield name, weight.grad


def test_the_documentation_lists_all_families() -> None:
    listed = re.search(r"^Decoder-only: (.*?)\.$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == DECODERS


@pytest.mark.parametrize("family", by_default(COUNTED))
def test_the_cost_of_a_block_equals_that_of_real_blocks(family: str, tmp_path: Path) -> None:
    """FLOPs computed without values equal the FLOPs of real tokens, which choose their experts."""
    spec, mask, flops = tiny(family, tmp_path), torch.ones(1, TOKENS, dtype=torch.bool), []
    hidden = torch.randn(1, TOKENS, spec.dim)
    for index in range(2):
        block = spec.build_block(index)
        with flop_counter() as counter:
            block(hidden, mask)
        flops.append(counter.get_total_flops())
    assert measure_cost(spec, TOKENS, 1).forward_flops == max(flops)


def test_the_cost_of_a_quantised_block_counts_its_experts_in_bfloat16(
    tmp_path: Path,
) -> None:
    base, kept_bytes, costs = cast(ModelSpec, tiny("mixtral", tmp_path)), [], []
    for how in (None, "nf4"):
        spec = LoraSpec(base, rank=2, kept="bfloat16", quantization=how)
        weights = dict(spec.build_block(1).named_parameters())
        experts = {each.dtype for name, each in weights.items() if "experts" in name}
        assert experts == {torch.bfloat16}
        kept_bytes.append(sum(each.nbytes for each in weights.values()))
        costs.append(measure_cost(spec, TOKENS, 1).block_bytes)
    assert costs[0] - costs[1] == kept_bytes[0] - kept_bytes[1] > 0


def test_the_cost_of_a_head_with_experts_equals_that_of_a_real_head(tmp_path: Path) -> None:
    spec, mask = tiny("mixtral", tmp_path), torch.ones(1, TOKENS, dtype=torch.bool)
    hidden = torch.randn(1, TOKENS, spec.dim, requires_grad=True)
    targets = torch.zeros(1, TOKENS, dtype=torch.int64)
    with flop_counter() as counter:
        spec.build_head(VOCABULARY).loss(hidden, mask, targets).backward()  # type: ignore[operator]
    assert head_flops(spec, VOCABULARY, TOKENS) == counter.get_total_flops()


def test_blocks_share_the_placeholders_of_other_layers(tmp_path: Path) -> None:
    first, last = map(tiny("llama", tmp_path, LAYERS).build_block, (0, LAYERS - 1))
    shared = zip(first.around.layers[1:-1], last.around.layers[1:-1], strict=True)  # type: ignore[union-attr,index]
    assert all(own is others for own, others in shared)


@pytest.mark.parametrize("family", by_default(("doge", "gemma2", "llama", "mixtral", "youtu")))
def test_only_families_without_fused_attention_save_attention_weights(
    family: str, tmp_path: Path
) -> None:
    spec, tokens, kept = tiny(family, tmp_path), 11, list[torch.Size]()
    block: Any = spec.build_block(1).train()
    hidden, mask = torch.randn(2, tokens, 16), torch.ones(2, tokens, dtype=torch.bool)
    mask[1, 7:] = False

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(hidden.requires_grad_(), mask)
    assert any(shape == (2, 4, tokens, tokens) for shape in kept) == (family in KEEPING)


@pytest.mark.parametrize("family", by_default(("cohere", "gemma2", "granite", "llama", "mixtral")))
def test_logits_in_pieces_have_the_loss_and_gradients_of_all_at_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The families scale and cap their logits in different ways."""
    torch.manual_seed(0)
    head: Any = tiny(family, tmp_path, LAYERS - 1).build_head(VOCABULARY)
    for weight in head.state_dict().values():
        weight.normal_(std=0.3)
    batch = batch_for("causal")
    given, results = torch.randn(*batch.mask.shape, 16), []
    for numbers in (output_layer._WHOLE, 0):
        monkeypatch.setattr(output_layer, "_WHOLE", numbers)
        head.zero_grad()
        hidden = given.clone().requires_grad_()
        loss = head.loss(hidden, batch.mask, batch.targets)
        loss.backward()
        gradients = [weight.grad for weight in head.parameters()]
        results.append([loss.detach(), hidden.grad, *gradients])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_untrained_weights_become_buffers_in_the_state() -> None:
    """Tables of positions are not in the state: they are computed."""
    part = torch.nn.Module()
    part.router = torch.nn.Linear(2, 3).requires_grad_(False)
    part.positions = torch.nn.Embedding(4, 2).requires_grad_(False)
    _constants_as_buffers(part)
    assert part.state_dict().keys() == {"router.weight", "router.bias"}
    assert not [*part.parameters()]


@pytest.mark.parametrize(
    "family", by_default(("deepseek_v3", "gemma2", "gpt_oss", "llama", "mixtral", "qwen3_5_text"))
)
def test_weights_kept_in_bfloat16_give_the_bits_of_rounded_float32_weights(
    family: str, tmp_path: Path
) -> None:
    """The loss, and each part's input and its gradient, have the same bits."""
    torch.manual_seed(0)
    wide = SplitModel(tiny(family, tmp_path), VOCABULARY).requires_grad_(False)
    for weight in wide.state_dict().values():
        weight.normal_(std=0.3)
    found = [passed(each) for each in (kept(wide), rounded(wide))]
    for own, expected in zip(*found, strict=True):
        assert torch.equal(own, expected)


def test_positions_that_depend_on_earlier_samples_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 23, **LLAMA, "rope_parameters": rope})
    )
    with pytest.raises(ConfigError, match="dynamic"):
        HuggingFaceSpec(str(tmp_path))


def changed(family: str, folder: Path, **fields: Any) -> HuggingFaceSpec:
    """The tiny model with these configuration ``fields`` changed."""
    tiny(family, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (other := folder / "changed").mkdir()
    (other / "config.json").write_text(json.dumps(config))
    return HuggingFaceSpec(str(other), num_blocks=2)


def test_router_noise_and_router_loss_are_off(tmp_path: Path) -> None:
    """Router noise would come from torch's generator; the router loss would balance experts."""
    spec = changed("mixtral", tmp_path, router_jitter_noise=0.5, output_router_logits=True)
    config = spec.run_config(None)
    assert (config.router_jitter_noise, config.output_router_logits) == (0.0, False)


@pytest.mark.parametrize(
    ("family", "option"), [("starcoder2", "embedding_dropout"), ("phi", "embd_pdrop")]
)
def test_dropout_is_applied_to_the_input_once(
    family: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These families apply dropout to their input; only the first part may do so here."""
    spec, dropped = changed(family, tmp_path, **{option: 0.5}), list[float]()
    real = dropout.dropout

    def counted(x: torch.Tensor, probability: float) -> torch.Tensor:
        dropped.append(probability)
        return real(x, probability)

    monkeypatch.setattr(dropout, "dropout", counted)
    SplitModel(spec, VOCABULARY).train().loss(batch_for("causal"), DropoutKey(0, 0, 0))
    assert [each for each in dropped if each] == [0.5]


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    chosen(
        itertools.product(DECODERS, (2, LAYERS)),
        [*((each, 2) for each in FEW.split()), ("olmo", 4)],
    ),
)
def test_a_split_family_equals_transformers(family: str, num_blocks: int, tmp_path: Path) -> None:
    """Check gradients, reading of weights and portable blocks with one pair of tiny models."""
    torch.manual_seed(0)
    spec = tiny(family, tmp_path, num_blocks)
    split = SplitModel(spec, VOCABULARY).train()
    for weight in split.state_dict().values():
        weight.normal_(std=0.2)  # initial weights are small or 0; larger ones would lose bits
    whole = getattr(transformers, spec.class_name).from_config(
        spec.run_config(VOCABULARY), attn_implementation="eager"
    )
    place = {name: spec.names.to_original(name) for name in split.state_dict()}
    found = {place[name]: weight for name, weight in split.state_dict().items()}
    assert whole.load_state_dict(found, strict=False) == ([], [])
    check_gradients(split, whole, place)
    check_pretrained(spec, whole, tmp_path / "pretrained")
    check_blocks(spec, split)


def check_gradients(split: SplitModel, whole: Any, place: dict[str, str]) -> None:
    """Loss and gradients equal transformers' values, with padding, windows, scales and routed
    experts."""
    batch = batch_for("causal")
    loss = split.loss(batch, DropoutKey(0, 0, 0))
    loss.backward()  # type: ignore[no-untyped-call]
    logits = whole.train()(batch.inputs, attention_mask=batch.mask, use_cache=False).logits
    expected = functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    own, theirs = dict(gradients(split)), dict(gradients(whole))
    assert {place[name] for name in own} == theirs.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, theirs[place[name]], rtol=1e-5, atol=1e-5, msg=name)


def check_pretrained(spec: HuggingFaceSpec, whole: Any, folder: Path) -> None:
    """Weights read part by part equal those that transformers reads. The padding row is zero,
    because transformers zeroes it in one family."""
    with torch.no_grad():
        whole.get_input_embeddings().weight[VOCABULARY.pad] = 0
    whole.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "converted", None)  # it would read the whole model
        own = SplitModel(replace(spec, name=str(folder), pretrained=True), VOCABULARY).state_dict()
    theirs = type(whole).from_pretrained(folder).state_dict()
    assert {spec.names.to_original(name) for name in own} == theirs.keys()
    for name, weight in own.items():
        assert torch.equal(weight, theirs[spec.names.to_original(name)]), name


@pytest.mark.parametrize(
    ("family", "dtype", "wide"),
    [
        ("ernie4_5_moe", "bfloat16", "gate.weight"),
        pytest.param("flint", "bfloat16", "sinks", marks=pytest.mark.thorough),
        pytest.param("gpt_oss", "float16", "norm", marks=pytest.mark.thorough),
    ],
)
def test_weights_that_transformers_keeps_in_float32_stay_in_float32(
    family: str, dtype: str, wide: str, tmp_path: Path
) -> None:
    """The model's files are bfloat16 or float16 except for these weights."""
    made = tiny(family, tmp_path)
    whole = getattr(transformers, made.class_name).from_config(made.run_config(VOCABULARY))
    whole.save_pretrained(tmp_path / "wide")
    narrow = type(whole).from_pretrained(tmp_path / "wide", dtype=getattr(torch, dtype))
    narrow.save_pretrained(tmp_path / "narrow")
    base = replace(made, name=str(tmp_path / "narrow"), pretrained=True)
    spec = LoraSpec(cast(ModelSpec, base), rank=2, kept=dtype)
    theirs, block = narrow.state_dict(), spec.build_block(1)
    kept = frozen_in(block, torch.float32)
    found = published(spec, "blocks.1", block, torch.float32)
    assert found is not None and found[0] == digest(kept)
    for name, weight in kept.items():
        own = base.names.to_original(spec.name_in_base(f"blocks.1.{name}"))
        assert torch.equal(weight, theirs[own].to(weight.dtype)), name
        assert weight.dtype == theirs[own].dtype or weight.dtype == torch.float32, name
    assert any(wide in name and each.dtype == torch.float32 for name, each in kept.items())


def check_blocks(spec: HuggingFaceSpec, split: SplitModel) -> None:
    """A device builds the same blocks without the folder; each block has layers for default
    adapters."""
    again = HuggingFaceSpec.from_portable(json.loads(json.dumps(spec.portable())))
    targets = LoraSpec(cast(ModelSpec, again)).target_modules or ()
    for index in range(2):
        with torch.device("meta"):
            theirs = again.build_block(index)
        own = split.blocks[index].state_dict()
        assert all(name.startswith("original.") for name in own)
        shapes = {name: each.shape for name, each in theirs.state_dict().items()}
        assert shapes == {name: each.shape for name, each in own.items()}
        assert any(f".{path}".endswith(targets) for path, _ in theirs.named_modules()), targets


def test_padding_longer_than_a_sliding_window_changes_no_loss_in_float64(tmp_path: Path) -> None:
    """Eager attention of float64 would give NaN to padding that sees no token."""
    model = SplitModel(tiny("gemma2", tmp_path), VOCABULARY).double()
    rows = [[3, 4, 5, 6, 7, 8, 9], [3, 4]]

    def loss(*some: Sequence[int]) -> float:
        batch = Batch(padded(some, 0), mask_of(some), padded(some, IGNORED))
        return float(model.loss(batch, DropoutKey(0, 0, 0)).detach())

    assert loss(*rows) == pytest.approx(sum(map(loss, rows)))
