"""Frozen weights are stored in a narrow type and compute as if they were wide."""

import copy
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from huggingface import CASES, ONE_OF_EACH, VOCABULARY, batch_for, folder, merged, spec_of
from narrow import kept, rounded
from second_device import second_device
from sections import adapter_settings, optimizer_settings
from thorough import chosen
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from collapipe.errors import ConfigError, WireError
from collapipe.models.cost import head_flops, measure_cost, upload_bits
from collapipe.models.description import describe, from_description
from collapipe.models.dropout import DropoutKey, drawing_from
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, with_adapters
from collapipe.models.part import Part
from collapipe.models.split import ModelSpec, SplitModel, frozen_names
from collapipe.models.stem import StemSpec
from collapipe.models.weights.kept import Widened, compute_dtype, keep, widen
from collapipe.process.torch_device import moved
from collapipe.sections import AdapterSettings
from collapipe.tensors import Tensors
from pipeline.devices.block_form import block_forms

KEY = DropoutKey(seed=5, unit=1, step=7)
LORA = adapter_settings()


def drawn(spec: ModelSpec) -> SplitModel:
    """A model with random weights of one seed; no trained weight is zero."""
    torch.manual_seed(3)
    model = SplitModel(spec, VOCABULARY).train()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.2 * torch.randn_like(weight)
    return model


def adapted(base: HuggingFaceSpec, **options: Any) -> LoraSpec:
    return LoraSpec(cast(ModelSpec, base), rank=2, alpha=7.0, **options)


@contextmanager
def nothing_widened() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Widened, "plain", None)
        yield


NF4 = {"kept": "bfloat16", "quantization": "nf4"}  # some weights in bfloat16, others in nf4
HOW = [{"kept": "bfloat16"}, {"kept": "float16"}, NF4, {"quantization": "int8"}]
THREE = [("gpt2", "causal"), ("llama", "causal"), ("t5", "decoder")]  # with own kinds of layers
THREE_IN_ALL_WAYS = [(*case, how) for case in THREE for how in HOW]


@pytest.mark.parametrize(
    ("name", "head", "how"),
    chosen(
        [(*case, how) for case in CASES for how in HOW],
        [*((*case.values, NF4) for case in ONE_OF_EACH if not case.marks), *THREE_IN_ALL_WAYS],
    ),
    ids=lambda each: each if isinstance(each, str) else each.get("quantization") or each["kept"],
)
def test_loss_and_gradients_have_the_bits_of_the_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: str, how: dict[str, str]
) -> None:
    spec, batch, found = adapted(spec_of(tmp_path, name, head), **how), batch_for(head), []
    for keeps in (keep, rounded):
        monkeypatch.setattr("collapipe.models.lora.keep", keeps)
        model = drawn(spec)
        loss = model.loss(batch, KEY)
        loss.backward()  # type: ignore[no-untyped-call]
        weights = dict(model.named_parameters())
        found.append((loss, {n: w.grad for n, w in weights.items() if w.grad is not None}))
        narrow = {n for n, w in weights.items() if w.dtype.itemsize < 4}
        frozen = {n for n in weights if n not in found[-1][1] and not n.endswith("_scale")}
        wide = spec_of(tmp_path, name, head).wide_names.get(how.get("kept", ""))
        frozen -= {n for n in frozen if wide and re.search(wide, n)}
        others = set() if "kept" in how else {n for n in frozen if n.endswith("bias")}
        assert narrow - others <= frozen
        assert bool(narrow) == (keeps is keep)
        assert keeps is rounded or "kept" not in how or narrow == frozen
    (loss, gradients), (expected, wanted) = found
    assert torch.equal(loss, expected)
    assert gradients.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(gradients[n], wanted[n])] == []


def test_kept_weights_compute_in_float64() -> None:
    layer, ids = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)), torch.tensor([[1, 4]])
    layer.requires_grad_(False)
    own = kept(layer, computes="float64")
    assert compute_dtype(own) == torch.float64
    assert torch.equal(own(ids), rounded(layer).double()(ids))


@pytest.mark.parametrize("quantization", [None, "int8", "nf4"])
def test_autograd_keeps_no_wide_copy(quantization: str | None) -> None:
    layer = kept(nn.Linear(8, 8).requires_grad_(False), quantization=quantization)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(2, 8, requires_grad=True))
    assert saved
    assert all(isinstance(each, Widened) for each in saved)


@pytest.mark.parametrize("quantization", [None, "int8", "nf4"])
def test_a_product_after_cost_counting_returns_a_real_tensor(quantization: str | None) -> None:
    def product() -> Tensor:
        layer = nn.Linear(1100, 1000).requires_grad_(False)
        kept = keep(layer, "bfloat16", "float32", quantization)
        return cast(Tensor, kept(torch.ones(1, 1100)))

    def after_counting() -> Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True):  # type: ignore[no-untyped-call]
            product()
        return product()

    with ThreadPoolExecutor(1) as pool:  # a thread that has not allocated memory yet
        assert type(pool.submit(after_counting).result()) is Tensor


@pytest.mark.parametrize("how", ["bfloat16", "int8", "nf4"])
def test_products_with_large_weights_in_several_threads_are_correct(how: str) -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 1100, 1000)
    weights[1, 500:] = weights[0, 500:]

    def products(layers: list[nn.Linear]) -> list[Tensor]:
        inputs = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
        inputs.requires_grad_()
        one, other = layers
        slices = inputs[:, :990] @ one.weight[:, :990].T, inputs @ other.weight[:1060].T
        made = *slices, one(inputs), other(inputs)
        sum(each.square().sum() for each in made).backward()
        with torch.inference_mode():  # torch dispatches to other operations here
            return [*made, one(inputs), cast(Tensor, inputs.grad)]

    def layers(weights: Tensor) -> list[nn.Linear]:
        found = [nn.Linear(1000, 1100) for _ in weights]
        for layer, weight in zip(found, weights, strict=True):
            layer.requires_grad_(False).weight.copy_(weight)
            layer.bias.zero_()
        return found

    options = ("bfloat16", "float32") if how == "bfloat16" else ("float32", "float32", how)
    kept = [keep(layer, *options) for layer in layers(weights)]
    expected = products(layers(torch.stack([each.weight.plain() for each in cast(Any, kept)])))
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(products, [kept] * 8):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def test_a_lookup_or_a_slice_does_not_widen_the_whole_weight() -> None:
    """Reading the dtype of the table, as embeddings and experts do, does not widen it either."""
    table = nn.Embedding(9, 4, padding_idx=0).requires_grad_(False)
    own, ids = kept(table), torch.tensor([[1, 2, 1]])
    with nothing_widened():
        found, rows = own(ids), own.weight[2:5]
        assert own.weight.dtype == torch.float32
    assert torch.equal(found, rounded(table)(ids))
    assert rows.nbytes == 2 * 3 * 4 * 2
    hidden = torch.randn(3, 4)
    assert torch.equal(functional.linear(hidden, rows), hidden @ rounded(table).weight[2:5].T)


def test_kept_modules_and_their_copies_keep_class_and_weight_names() -> None:
    norm = nn.LayerNorm(4).requires_grad_(False)
    own = copy.deepcopy(kept(norm))
    assert isinstance(own, nn.LayerNorm)
    assert own.state_dict().keys() == norm.state_dict().keys()
    assert {each.dtype for each in own.parameters()} == {torch.bfloat16}
    assert not any(each.requires_grad for each in own.parameters())
    assert type(widen(own)) is nn.LayerNorm  # type: ignore[comparison-overlap]
    assert {each.dtype for each in own.parameters()} == {torch.float32}


def test_trained_weights_and_constants_stay_in_float32(tmp_path: Path) -> None:
    """The constants of a Llama block are its rotary frequencies."""
    block = adapted(spec_of(tmp_path, "llama", "causal"), kept="bfloat16").build_block(0)
    assert {w.dtype for w in block.parameters() if w.requires_grad} == {torch.float32}
    assert all(each.dtype == torch.float32 for each in block.buffers() if each.is_floating_point())


def published(tmp_path: Path, dtype: torch.dtype) -> tuple[Path, Tensors]:
    """A folder with the weights of a small Llama, and these weights."""
    path = folder(tmp_path, "llama")
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path)
    return path, dict(model.state_dict())


@pytest.mark.parametrize("stem", [None, 2])
def test_pretrained_weights_are_kept_as_they_were_published(
    tmp_path: Path, stem: int | None
) -> None:
    path, weights = published(tmp_path, torch.bfloat16)
    base = HuggingFaceSpec(str(path), pretrained=True, num_blocks=3, dtype="auto")
    spec = with_adapters(cast(ModelSpec, base), adapter_settings(last_blocks=stem))
    assert isinstance(spec, StemSpec) == (stem is not None)
    model = SplitModel(spec, VOCABULARY)
    published_bits = sorted(each.flatten().tolist() for each in weights.values())
    frozen = [w for w in model.parameters() if not w.requires_grad]
    assert {each.dtype for each in frozen} == {torch.bfloat16}
    assert sorted(each.flatten().tolist() for each in frozen) == published_bits


@pytest.mark.parametrize("pretrained", [True, False])
def test_trained_weights_are_float32_even_if_published_in_bfloat16(
    tmp_path: Path, pretrained: bool
) -> None:
    path, _ = published(tmp_path, torch.bfloat16)
    base = HuggingFaceSpec(str(path), pretrained=pretrained, dtype="auto")
    model = SplitModel(cast(ModelSpec, base), VOCABULARY)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("dtype", "written", "expected"),
    [
        ("auto", "float16", torch.float16),
        ("auto", "float32", torch.float32),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
    ],
)
def test_dtype_auto_is_the_type_of_the_published_weights(
    tmp_path: Path, dtype: Any, written: str, expected: torch.dtype
) -> None:
    path, _ = published(tmp_path, getattr(torch, written))
    for pretrained in (True, False):
        base = HuggingFaceSpec(str(path), pretrained=pretrained, dtype=dtype)
        block = with_adapters(cast(ModelSpec, base), LORA).build_block(0)
        found = {weight.dtype for weight in block.parameters() if not weight.requires_grad}
        assert found == {torch.float32 if dtype == "auto" and not pretrained else expected}


def test_a_dtype_needs_frozen_weights(tmp_path: Path) -> None:
    for dtype in ("auto", "float32"):
        base = HuggingFaceSpec(str(folder(tmp_path, "llama")), dtype=cast(Any, dtype))
        assert with_adapters(cast(ModelSpec, base), AdapterSettings("none")) is base
    for option, value in (("dtype", "bfloat16"), ("quantization", "nf4")):
        base = HuggingFaceSpec(str(folder(tmp_path, "llama")), **cast(Any, {option: value}))
        with pytest.raises(
            ConfigError, match=rf"^model\.{option}={value}: .*adapter=lora"
        ) as error:
            with_adapters(cast(ModelSpec, base), AdapterSettings("none"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", HOW[1:])
def test_a_device_builds_blocks_with_the_same_weight_types(
    tmp_path: Path, how: dict[str, str]
) -> None:
    spec = adapted(spec_of(tmp_path, "llama", "causal"), **how)
    again = from_description(json.loads(json.dumps(describe(spec))))
    forms = block_forms(again, range(1), optimizer_settings(), torch.float32)
    assert forms["blocks.0"].weights
    for name, weight in spec.build_block(0).state_dict().items():
        assert forms["blocks.0"].tensors[f"blocks.0.{name}"].dtype == weight.dtype
    assert forms["blocks.0"].build(dict(spec.build_block(0).state_dict())).training
    for name in ("kept", "computes", "quantization"):
        with pytest.raises(WireError, match="complex64"):
            from_description({**describe(spec), name: "complex64"})


@pytest.mark.parametrize("how", HOW[1:])
def test_merged_weights_are_wide_and_compute_the_same(tmp_path: Path, how: dict[str, str]) -> None:
    base, batch = spec_of(tmp_path, "gpt2", "causal"), batch_for("causal")
    spec = adapted(base, **how)
    model = drawn(spec).eval()
    before = copy.deepcopy(model.state_dict())
    plain = SplitModel(cast(ModelSpec, base), VOCABULARY).eval()
    plain.load_state_dict(found := merged(spec, model.state_dict()))
    assert {each.dtype for each in found.values()} == {torch.float32}
    torch.testing.assert_close(plain.loss(batch, KEY), model.loss(batch, KEY))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_upload_does_not_depend_on_the_kept_type(tmp_path: Path) -> None:
    base = spec_of(tmp_path, "llama", "causal")
    wide, narrow = (adapted(base, kept=dtype) for dtype in ("float32", "bfloat16"))
    assert frozen_names(wide, VOCABULARY) == frozen_names(narrow, VOCABULARY)
    assert upload_bits(wide, VOCABULARY) == upload_bits(narrow, VOCABULARY)


def test_the_cost_counts_kept_weights_and_one_widened_weight(tmp_path: Path) -> None:
    base = spec_of(tmp_path, "llama", "causal")
    wide, narrow = (adapted(base, kept=dtype) for dtype in ("float32", "bfloat16"))
    expected, found = (measure_cost(spec, 8, 4) for spec in (wide, narrow))
    frozen = [w for w in narrow.build_block(0).parameters() if not w.requires_grad]
    saved = sum(weight.nbytes for weight in frozen)
    assert found.block_bytes == expected.block_bytes - saved
    assert found.segment_bytes == 2 * max(weight.nbytes for weight in frozen)
    assert (found.flops, found.hop_bits) == (expected.flops, expected.hop_bits)
    again = measure_cost(narrow, 8, 4, recompute=True)
    assert again.segment_bytes == found.segment_bytes + 4 * found.activation_bits / 8
    assert head_flops(wide, VOCABULARY, 8) == head_flops(narrow, VOCABULARY, 8)


@pytest.mark.parametrize("how", HOW[1:])
def test_predicted_bytes_are_within_10_percent_of_the_measured_peak(
    tmp_path: Path, how: dict[str, str]
) -> None:
    """Torch's profiler counts the allocated bytes; the block's activations are small."""
    sizes = {"hidden_size": 128, "intermediate_size": 512}
    spec = adapted(spec_of(tmp_path, "llama", "causal", **sizes), **how)
    part = Part("blocks.0", spec.build_block(0), optimizer_settings())
    batch = torch.randn(1, 2, 128, requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    own = sum(each.nbytes for each in part.module.parameters())

    def step() -> None:
        with drawing_from(torch.Generator()):
            part.module(*batch).sum().backward()

    step()
    part.step(0.1, 1.0)  # makes the optimiser's state
    kept_bytes = own + sum(each.nbytes for each in part.optimizer_state().values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    most = now = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    predicted = measure_cost(spec, 2, 1).segment_needs(1, 1)
    assert kept_bytes + most == pytest.approx(predicted, rel=0.1)


def test_a_device_without_the_dtype_is_refused() -> None:
    with second_device() as device:  # has no float64
        moved(nn.Linear(2, 2), device)
        with pytest.raises(ConfigError, match=r"^second:0: .*model\.dtype") as caught:
            moved(nn.Linear(2, 2).double(), device)
    assert "\n" not in str(caught.value)
