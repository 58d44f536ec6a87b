"""Incomplete pretrained weights are refused; only a head of labels may start with random
weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from collapipe.errors import ConfigError
from collapipe.models.huggingface import weights as reading
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import ModelSpec, SplitModel
from tests.huggingface import VOCABULARY, folder, spec_of

Weights = dict[str, Tensor]
_MORE = pytest.mark.thorough
_LAYER = "bert.encoder.layer.2."


def _saved(path: Path, name: str, kind: str, change: Callable[[Weights], Weights]) -> Path:
    """A folder with random weights, modified by ``change``."""
    made = folder(path, name)
    config = transformers.AutoConfig.from_pretrained(made)
    getattr(transformers, kind)(config).save_pretrained(made)
    file = made / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return made


def _without(beginning: str) -> Callable[[Weights], Weights]:
    return lambda weights: {k: v for k, v in weights.items() if not k.startswith(beginning)}


def _prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: each for name, each in weights.items()}


def _narrower(weights: Weights) -> Weights:
    name = f"{_LAYER}output.dense.bias"
    return {**weights, name: weights[name][1:].clone()}


def _as(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: {k: v.to(dtype) for k, v in weights.items()}


def _times(factor: float) -> Callable[[Weights], Weights]:
    return lambda weights: {k: v * factor if "norm" in k.lower() else v for k, v in weights.items()}


def _build(path: Path, head: str) -> list[torch.nn.Module]:
    spec = HuggingFaceSpec(str(path), head=head, pretrained=True)
    return [spec.build_embedding(VOCABULARY), spec.build_block(2), spec.build_head(VOCABULARY)]


@pytest.mark.parametrize(
    ("name", "kind", "head", "change", "message"),
    [
        ("bert", "BertForMaskedLM", "tokens", _without(_LAYER), f"16 tensors .*{_LAYER}attention"),
        pytest.param("bert", "BertModel", "tokens", _prefixed("odd."), "69 tensors", marks=_MORE),
        ("bert", "BertForMaskedLM", "tokens", _narrower, "1 tensors .*output.dense.bias"),
        ("llama", "LlamaForCausalLM", "causal", _without("lm_head"), r"1 tensors .*lm_head.weight"),
        ("llama", "LlamaForCausalLM", "causal", _as(torch.int8), "is torch.int8: quantised"),
        ("bert", "BertForMaskedLM", "tokens", _as(torch.int8), "is torch.int8: quantised"),
        ("llama", "LlamaForCausalLM", "causal", _times(math.nan), "norm.weight has values that"),
        ("bert", "BertForMaskedLM", "tokens", _times(math.inf), "LayerNorm.* has values that"),
        pytest.param(
            "llama", "LlamaForCausalLM", "causal", _without("model.layers.3"), "9 ", marks=_MORE
        ),
    ],
)
def test_missing_misshapen_quantised_or_non_finite_weights_are_refused(
    tmp_path: Path,
    name: str,
    kind: str,
    head: str,
    change: Callable[[Weights], Weights],
    message: str,
) -> None:
    spec = HuggingFaceSpec(str(_saved(tmp_path, name, kind, change)), head=head, pretrained=True)
    with pytest.raises(ConfigError, match=message) as caught:
        SplitModel(cast(ModelSpec, spec), VOCABULARY)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@_MORE
def test_an_index_that_names_missing_tensors_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path, "bert", "BertForMaskedLM", lambda weights: weights)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    named = _without(_LAYER)(weights)
    save_file(named, path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="16 tensors"):
        _build(path, "tokens")


@pytest.mark.parametrize(
    "prefix",
    ["module._orig_mod.", *(pytest.param(p, marks=_MORE) for p in ("_orig_mod.", "module."))],
)
def test_names_of_a_wrapped_model_are_read(tmp_path: Path, prefix: str) -> None:
    path = _saved(tmp_path, "bert", "BertForMaskedLM", _prefixed(prefix))
    kept = load_file(path / "model.safetensors")[f"{prefix}{_LAYER}output.dense.bias"]
    _, block, _ = _build(path, "tokens")
    assert torch.equal(block.state_dict()["original.output.dense.bias"], kept)


@pytest.mark.parametrize("head", ["tokens", pytest.param("pooled", marks=_MORE)])
def test_a_head_of_labels_may_start_with_random_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    """A head with another number of labels starts with random weights too, with a warning."""
    _build(_saved(tmp_path, "bert", "BertForMaskedLM", lambda weights: weights), head)
    assert not caplog.messages
    other = tmp_path / "other"
    other.mkdir()
    _build(_saved(other, "bert", "BertForTokenClassification", lambda weights: weights), head)
    assert any("begins fresh" in each for each in caplog.messages)


def _stored(tmp_path: Path, name: str, head: str) -> ModelSpec:
    """A model whose folder has weights in bfloat16 in several files."""
    spec = spec_of(tmp_path, name, head)
    kind = getattr(transformers, spec.class_name)
    whole = kind.from_config(spec.run_config(VOCABULARY)).to(torch.bfloat16)
    whole.save_pretrained(spec.name, max_shard_size="6KB")
    return cast(ModelSpec, HuggingFaceSpec(spec.name, None, spec.num_blocks, head, pretrained=True))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("llama-tied", "causal"),
        ("t5", "decoder"),
        *(
            pytest.param(*case, marks=_MORE)
            for case in (
                ("llama", "causal"),
                ("gpt2", "causal"),
                ("bart", "decoder"),
                ("marian-apart", "decoder"),
                ("t5-gated", "decoder"),
            )
        ),
    ],
)
def test_mapped_parts_equal_those_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, head: str
) -> None:
    spec = _stored(tmp_path, name, head)
    with monkeypatch.context() as patch:
        patch.setattr(reading, "converted", lambda *_: pytest.fail("the whole model was read"))
        mapped = SplitModel(spec, VOCABULARY)
    monkeypatch.setattr(reading, "mapped", lambda *_: None)
    converted = SplitModel(spec, VOCABULARY).state_dict()
    assert mapped.state_dict().keys() == converted.keys()
    assert all(torch.equal(each, converted[n]) for n, each in mapped.state_dict().items())
    assert all(each.requires_grad and each.dtype == torch.float32 for each in mapped.parameters())


def test_blocks_built_twice_share_no_weights(tmp_path: Path) -> None:
    """Both mapped weights and weights that transformers has read."""
    path = _saved(tmp_path, "bert", "BertForMaskedLM", lambda weights: weights)
    for spec in (_stored(tmp_path, "llama", "causal"), HuggingFaceSpec(str(path), pretrained=True)):
        one, other = (cast(Any, spec).build_block(1) for _ in range(2))
        with torch.no_grad():
            for each in one.parameters():
                each.zero_()
        assert all(bool(each.any()) for each in other.parameters() if each.dim() > 1)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    spec = _stored(tmp_path, "llama", "causal")
    shard = sorted(Path(str(spec.own_tokenizer)).glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cannot read weights from safetensors") as caught:
        spec.build_block(0)
    assert "\n" not in str(caught.value)
