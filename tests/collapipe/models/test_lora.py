"""Adapters in the split, micro-batched model train as peft trains them in the unchanged model."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from huggingface import (
    SIZES,
    VOCABULARY,
    InFloat64,
    batch_for,
    merged,
    own_loss,
    spec_of,
    untouched,
    without_dropout,
)
from sections import adapter_settings, optimizer_settings
from split_parts import model_of, parts_of, segments_of
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from collapipe.errors import ConfigError
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.families import FAMILIES
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, with_adapters
from collapipe.models.split import (
    HEAD,
    ModelSpec,
    SplitModel,
    frozen_names,
    kinds_of_blocks,
    training_names,
)
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan
from collapipe.sections import AdapterSettings
from collapipe.text.vocabulary import Vocabulary
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.inline import inline_pipeline

PAGE = Path(__file__).parents[3] / "docs/how-to/lora.md"
KEY = DropoutKey(seed=5, unit=1, step=7)
OWN = TransformerSpec(4, 2, dim=16, num_heads=2, feed_forward_dim=24, dropout=0.0)
HEAD_MODULES = {"tokens": ["classifier"], "pooled": ["classifier", "pooler"]}
NO_DEFAULT = ["q_lin", "v_lin"]  # peft has no default for distilbert
CASES = [
    ("bert", "tokens"),
    ("bert", "pooled"),
    ("roberta", "pooled"),
    ("distilbert", "tokens"),
    ("gpt2", "causal"),
    ("llama", "causal"),
    ("bart", "decoder"),
    ("t5", "decoder"),
]
KINDS = [("bert", "pooled"), ("gpt2", "causal"), ("t5", "decoder"), ("own", "decoder")]


def adapted(tmp_path: Path, name: str, head: str, **options: Any) -> LoraSpec:
    """Adapters on a small model whose dropout is 0; ``own`` is our Transformer."""
    base = OWN if name == "own" else spec_of(tmp_path, name, head, **without_dropout(name))
    return LoraSpec(cast(ModelSpec, base), rank=3, alpha=7.0, **options)


def weights_of(spec: LoraSpec) -> dict[str, Tensor]:
    """Random weights that are not zero; both copies of a tied weight are equal."""
    torch.manual_seed(3)
    weights = SplitModel(spec, VOCABULARY).to(torch.float64).state_dict()
    weights = {name: weight + 0.2 * torch.randn_like(weight) for name, weight in weights.items()}
    twins = spec.base.untied() if isinstance(spec.base, HuggingFaceSpec) else {}
    return weights | {ours: weights[twin].clone() for ours, twin in twins.items()}


def pipeline_of(
    spec: ModelSpec, weights: dict[str, Tensor], cut: Sequence[int]
) -> tuple[Pipeline, SplitModel]:
    """A cluster with copies of ``weights``."""
    model = model_of(spec, weights, VOCABULARY)
    model.to(torch.float64)  # includes rotary angles: in float32 they depend on a batch's shape
    embedding, blocks, head = parts_of(model, optimizer_settings())
    plan = ClusterPlan(KEY.unit, segments_of(cut), 3, "one_f_one_b")
    return inline_pipeline(plan, embedding, blocks, LocalHead(head)), model


def trained_names(spec: ModelSpec) -> set[str]:
    """Names of the weights that are not frozen."""
    with torch.device("meta"):
        names = dict(SplitModel(spec, VOCABULARY).named_parameters()).keys()
    return names - frozen_names(spec, VOCABULARY)


def cut_of(spec: ModelSpec) -> tuple[int, ...]:
    """Three segments, or two of a causal model."""
    return (1, 2, 1) if spec.num_blocks == 4 else (1, 2)


def with_peft(spec: LoraSpec, head: str, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """The unchanged model with peft's adapters and ``weights``; its trained weights by our
    names."""
    base = spec.base
    assert isinstance(base, HuggingFaceSpec)
    plain = SplitModel(cast(ModelSpec, base), VOCABULARY).to(torch.float64)
    plain.load_state_dict(
        {n.replace(".base_layer.", "."): w for n, w in weights.items() if ".lora_" not in n}
    )
    whole, _ = untouched(base, plain)
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=NO_DEFAULT if base.own_config.model_type == "distilbert" else None,
        modules_to_save=HEAD_MODULES.get(head),
        fan_in_fan_out=base.own_config.model_type == "gpt2",
    )
    model = peft.get_peft_model(whole, config)
    trained = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            original = name.removeprefix("base_model.model.").replace(
                ".modules_to_save.default", ""
            )
            ours = base.names.to_ours(original)
            trained[ours] = weight
            weight.data.copy_(weights[ours])
    return model.to(torch.float64).train(), trained


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # from transformers itself
@pytest.mark.filterwarnings("error:fan_in_fan_out")  # peft warns if this option is wrong
@pytest.mark.parametrize(("name", "head"), CASES)
def test_three_steps_equal_peft_on_the_unchanged_model(
    tmp_path: Path, name: str, head: str
) -> None:
    """The same weights train; losses and gradients are equal in three steps, hence weights after
    two."""
    spec, batch = adapted(tmp_path, name, head), batch_for(head)
    weights, settings = weights_of(spec), optimizer_settings()
    with InFloat64():
        pipeline, split = pipeline_of(spec, weights, cut_of(spec))
        whole, trained = with_peft(spec, head, weights)
        optimizer = torch.optim.AdamW(
            trained.values(),
            lr=0.01,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        assert trained.keys() == trained_names(spec)
        for _ in range(3):
            loss, expected = pipeline.run(batch, KEY), own_loss(head, whole, batch)
            expected.backward()  # type: ignore[no-untyped-call]
            assert loss == pytest.approx(expected.item(), rel=0, abs=1e-8)
            for ours, parameter in split.named_parameters():
                if ours not in trained:
                    assert parameter.grad is None, ours
                    assert torch.equal(parameter, weights[ours]), ours
                    continue
                wanted = trained[ours].grad
                assert wanted.any(), ours
                torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-8, msg=ours)
            clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            pipeline.step(0.01, 0.5)


@pytest.mark.parametrize(("name", "head"), KINDS)
def test_the_first_model_is_the_base_model_of_the_same_seed(
    tmp_path: Path, name: str, head: str
) -> None:
    """Adapters draw from a separate random stream and initially add 0."""
    spec, states = adapted(tmp_path, name, head), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(SplitModel(spec, VOCABULARY))
    first, again, other = (model.state_dict() for model in states)
    torch.manual_seed(3)
    base = SplitModel(spec.base, VOCABULARY)
    plain = merged(spec, first)
    assert plain.keys() == base.state_dict().keys()
    assert all(torch.equal(plain[key], weight) for key, weight in base.state_dict().items())
    assert torch.equal(states[0].loss(batch_for(head), KEY), base.loss(batch_for(head), KEY))
    assert all(torch.equal(first[key], again[key]) for key in first)
    torch.manual_seed(3)
    alone = spec.build_block(1).state_dict()  # without building other parts before
    for key in alone:
        assert "lora_A" not in key or torch.equal(alone[key], first[f"blocks.1.{key}"])
    drawn = [key for key in first if "lora_A" in key]
    assert len({tuple(first[key].flatten().tolist()) for key in drawn}) == len(drawn)
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize(("name", "head"), KINDS)
def test_merged_weights_compute_the_same_without_adapters(
    tmp_path: Path, name: str, head: str
) -> None:
    """Merging, as an export does it, does not change the given weights."""
    spec, batch = adapted(tmp_path, name, head), batch_for(head)
    weights = weights_of(spec)
    copies = {key: weight.clone() for key, weight in weights.items()}
    with InFloat64(), torch.no_grad():
        _, model = pipeline_of(spec, weights, cut_of(spec))
        _, plain = pipeline_of(spec.base, merged(spec, weights), cut_of(spec))
        hidden, expected = (m.encode(batch.inputs, batch.mask) for m in (plain, model))
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-9)
        loss, expected = plain.loss(batch, KEY), model.loss(batch, KEY)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    assert all(torch.equal(weights[key], copies[key]) for key in copies)


@pytest.mark.parametrize(("name", "head"), [("bert", "pooled"), ("gpt2", "causal"), ("own", "")])
def test_dropout_of_adapters_depends_only_on_the_key(tmp_path: Path, name: str, head: str) -> None:
    """The cut and torch's generator do not change it; the state of torch's generator stays the
    same."""
    spec = adapted(tmp_path, name, head, dropout=0.3)
    weights, batch, losses = weights_of(spec), batch_for(head), []
    for number, cut in enumerate([cut_of(spec), (sum(cut_of(spec)),)]):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        pipeline, _ = pipeline_of(spec, weights, cut)
        losses.append(pipeline.run(batch, KEY))
        assert torch.equal(before, torch.get_rng_state())
    assert losses[0] == losses[1]
    pipeline, _ = pipeline_of(spec, weights, cut_of(spec))
    assert pipeline.run(batch, replace(KEY, step=8)) != losses[0]
    pipeline, _ = pipeline_of(replace(spec, dropout=0.0), weights, cut_of(spec))
    assert pipeline.run(batch, KEY) != losses[0]


def test_adapters_and_the_head_of_a_task_train(tmp_path: Path) -> None:
    """Adapters train in all layers whose names match, the task's head trains in full, the embedding
    is frozen."""
    names = trained_names(adapted(tmp_path, "own", "decoder"))
    assert all(".lora_" in name for name in names)
    # A and B; query and value; decoder blocks have two attentions
    assert len(names) == 2 * 2 * (4 + 2 * 2)
    bert = adapted(tmp_path, "bert", "pooled", target_modules=("dense",))
    names = trained_names(bert)
    head = {"pooler.dense", "classifier"}
    for kind in ("weight", "bias"):
        assert {f"head.original.{n}.{kind}".replace("l.p", "l.bert.p") for n in head} <= names
    assert not any(".lora_" in name for name in names if name.startswith("head."))
    plain = SplitModel(OWN, VOCABULARY)
    assert trained_names(OWN) == dict(plain.named_parameters()).keys()


def test_the_documented_adapter_layers_equal_the_defaults(tmp_path: Path) -> None:
    """The page lists the default layers of each family and all layers that a user may choose."""
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    documented = {
        family: [re.findall(r"`(\w+)`", cell) for cell in (chosen, further)]
        for families, chosen, further in rows
        for family in families.split("`, `")
    }
    bases: dict[str, Any] = {
        family: spec_of(tmp_path, family, next(iter(FAMILIES[family].heads))) for family in SIZES
    }
    for family, base in {**bases, "model=transformer": OWN}.items():
        chosen, further = documented[family]
        assert LoraSpec(cast(ModelSpec, base)).target_modules == tuple(chosen)
        layers = base.build_block(0).named_modules()
        linear = {name.rpartition(".")[2] for name, layer in layers if has_matrix(layer)}
        assert linear <= {*chosen, *further}


def has_matrix(layer: nn.Module) -> bool:
    """Whether the layer is ``nn.Linear`` or GPT-2's ``Conv1D``."""
    return type(layer).__name__ in ("Linear", "Conv1D")


def test_a_causal_model_trains_if_its_head_has_no_adapters(tmp_path: Path) -> None:
    """The head is only a norm and an output layer, both frozen; training steps still lower the
    loss."""
    base = replace(spec_of(tmp_path, "llama", "causal", **without_dropout("llama")), num_blocks=4)
    spec = LoraSpec(cast(ModelSpec, base))
    assert not any(name.startswith(HEAD) for name in trained_names(spec))
    pipeline, _ = pipeline_of(spec, weights_of(spec), (2, 2))
    losses = []
    for _ in range(2):
        losses.append(pipeline.run(batch_for("causal"), KEY))
        pipeline.step(0.01, None)
    assert losses[1] < losses[0]


def test_target_modules_need_to_match_only_one_kind_of_block(tmp_path: Path) -> None:
    """Blocks with linear attention have no ``q_proj`` and hence no adapter."""
    config = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "head_dim": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 23}
    linear = {f"linear_{kind}_head_dim": 4 for kind in ("key", "value")}
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    base = HuggingFaceSpec(family="qwen3_5_text", config={**config, **linear})
    spec = LoraSpec(cast(ModelSpec, base), target_modules=("q_proj",))
    assert kinds_of_blocks(spec) == (0, 3)
    with torch.device("meta"):
        adapted = [bool(training_names(spec.build_block(index))) for index in range(4)]
    assert adapted == [False, False, False, True]
    with pytest.raises(ConfigError, match="=q_proj: no block has"):
        LoraSpec(cast(ModelSpec, replace(base, num_blocks=3)), target_modules=("q_proj",))
    with pytest.raises(ConfigError, match="=in_proj_qkv: no block has"):  # not in the last block
        LoraSpec(cast(ModelSpec, base), target_modules=("in_proj_qkv",), first_block=3)


class Foreign:
    """A custom model with a head for a task."""

    num_blocks, dim, own_tokenizer = 1, 4, None

    def build_embedding(self, vocabulary: Vocabulary) -> nn.Module:
        return nn.Embedding(vocabulary.size, 4)

    def build_block(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def build_head(self, vocabulary: Vocabulary) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4), nn.ModuleDict({"answer": nn.Linear(4, 2)}))


def test_a_custom_model_needs_target_modules_and_trains_its_head() -> None:
    """The head has no layer of the target modules, so it trains in full."""
    foreign = cast(ModelSpec, Foreign())
    with pytest.raises(ConfigError, match=r"adapter\.target_modules=null: .* a Foreign; list"):
        LoraSpec(foreign)
    names = trained_names(LoraSpec(foreign, target_modules=("0",)))
    head = {"head.0.weight", "head.0.bias", "head.1.answer.weight", "head.1.answer.bias"}
    assert names == head | {f"blocks.0.0.lora_{half}.default.weight" for half in "AB"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ("query", "norm")}, "=norm: .* they have inner, key, outer, output"),
        ({"target_modules": ("uery",)}, "=uery: no block has a linear layer"),
        ({"target_modules": ()}, r"target_modules=\[\]: "),
    ],
)
def test_invalid_target_modules_are_refused_in_one_line(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LoraSpec(OWN, **options)
    assert "\n" not in str(caught.value)


def test_settings_select_the_spec() -> None:
    """Specs with equal options are equal, because caches use them as keys."""
    assert with_adapters(OWN, AdapterSettings("none")) is OWN
    spec = with_adapters(OWN, adapter_settings(rank=4, dropout=0.1, target_modules=["key"]))
    assert {spec} == {LoraSpec(OWN, 4, 8.0, 0.1, ("key",))}
