"""Adapter folders in peft's format: peft computes the same loss, and a run can start from one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from huggingface import LABELS, VARIANTS, VOCABULARY, batch_for, folder, own_loss, without_dropout
from safetensors.torch import load_file, save_file

from collapipe.cli.trained.export import how_to_load
from collapipe.errors import ConfigError
from collapipe.models.adapter_folder import begin_with, options_in, write_adapter
from collapipe.models.dropout import DropoutKey
from collapipe.models.huggingface.assembly import assembled
from collapipe.models.huggingface.families import CLASSES
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec, merge_adapters
from collapipe.models.split import ModelSpec, SplitModel
from collapipe.models.stem import StemSpec

KEY = DropoutKey(0, 0, 0)


def published(tmp_path: Path, name: str, head: str) -> HuggingFaceSpec:
    """Save a random model with transformers; return the spec that loads it. Its configuration does
    not name the labels, as one that was published for another task."""
    path = folder(tmp_path, name, **without_dropout(VARIANTS[name][0]))
    config = transformers.AutoConfig.from_pretrained(path, num_labels=LABELS)
    torch.manual_seed(4)
    getattr(transformers, CLASSES[head][0]).from_config(config).save_pretrained(path)
    kept = json.loads((path / "config.json").read_text())
    kept = {key: each for key, each in kept.items() if key not in ("id2label", "label2id")}
    (path / "config.json").write_text(json.dumps(kept))
    return HuggingFaceSpec(str(path), None, 3 if head == "causal" else None, head, pretrained=True)


def adapted(tmp_path: Path, name: str, head: str, first: int = 0, **options: Any) -> ModelSpec:
    """Add adapters to ``published`` from block ``first`` on; blocks before ``first`` are a stem."""
    base = cast(ModelSpec, published(tmp_path, name, head))
    targets = ("q_lin", "v_lin") if name == "distilbert" else None
    spec = LoraSpec(base, 3, 7.0, **{"target_modules": targets, "first_block": first, **options})
    return StemSpec(spec, first) if first else spec


def trained(spec: ModelSpec) -> SplitModel:
    """A model whose trained weights have been changed at random."""
    torch.manual_seed(3)
    model = SplitModel(spec, VOCABULARY)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += 0.2 * torch.randn_like(weight)
    return model.eval()


def loaded(base: HuggingFaceSpec, path: Path) -> Any:
    """Load the base model and the adapter folder as ``collapipe export`` prints."""
    libraries = {"transformers": transformers, "peft": peft}
    return eval(how_to_load(base, VOCABULARY, path), libraries).eval()


def _with_options_in(spec: ModelSpec, out: Path) -> ModelSpec:
    """``spec`` with the adapter options that the folder's configuration states."""
    if isinstance(spec, StemSpec):
        return replace(spec, base=_with_options_in(spec.base, out))
    assert isinstance(spec, LoraSpec)
    return replace(spec, **options_in(out))


@pytest.mark.filterwarnings("error:fan_in_fan_out", "error:Found missing adapter keys")
@pytest.mark.parametrize(
    ("name", "head", "options"),
    [
        ("llama", "causal", {}),
        ("llama-tied", "causal", {"first": 1, "rslora": True}),
        ("gpt2", "causal", {"target_modules": ("c_attn", "mlp.c_proj")}),
        ("bert", "pooled", {"target_modules": ("dense",)}),
        ("bert", "pooled", {"target_modules": ("query", "attention.output.dense")}),
        ("bert", "tokens", {"first": 2}),
        pytest.param("roberta", "pooled", {}, marks=pytest.mark.thorough),
        pytest.param("distilbert", "tokens", {}, marks=pytest.mark.thorough),
        pytest.param("eurobert", "pooled", {}, marks=pytest.mark.thorough),
        pytest.param("bart", "decoder", {"first": 2}, marks=pytest.mark.thorough),
        ("t5", "decoder", {}),
    ],
)
def test_peft_and_exported_models_have_the_loss_of_the_run(
    tmp_path: Path, name: str, head: str, options: dict[str, Any]
) -> None:
    """peft, the assembled model and the merged model have the split model's loss; a new run loads
    the same bits."""
    spec, batch, out = adapted(tmp_path, name, head, **options), batch_for(head), tmp_path / "out"
    model = trained(spec)
    base = write_adapter(spec, VOCABULARY, model.state_dict(), out)
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    expected = (model.loss(batch, KEY) / batch.num_targets).item()
    whole = assembled(spec, VOCABULARY, model.state_dict())
    with torch.no_grad():
        assert own_loss(head, loaded(base, out), batch).item() == pytest.approx(expected, abs=1e-5)
        assert own_loss(head, whole, batch).item() == pytest.approx(expected, abs=1e-5)
        merge_adapters(whole)
        assert own_loss(head, whole, batch).item() == pytest.approx(expected, abs=1e-5)
    torch.manual_seed(9)
    restored = _with_options_in(spec, out)
    fresh = SplitModel(restored, VOCABULARY)
    begin_with(out, restored, fresh.state_dict())
    assert all(torch.equal(fresh.state_dict()[n], each) for n, each in model.state_dict().items())


def test_adapter_config_lists_target_modules_layers_and_base_model(tmp_path: Path) -> None:
    """Layers are listed by the last part of their names and by block numbers."""
    spec, out = adapted(tmp_path, "llama", "causal", first=1), tmp_path / "out"
    base = write_adapter(spec, VOCABULARY, trained(spec).state_dict(), out)
    config = json.loads((out / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    assert config["layers_to_transform"] == [1, 2, 3]
    assert (config["base_model_name_or_path"], config["task_type"]) == (base.name, "CAUSAL_LM")
    assert options_in(out) == {
        "rank": 3,
        "alpha": 7.0,
        "rslora": False,
        "target_modules": ["q_proj", "v_proj"],
    }


def test_a_run_can_start_from_a_folder_that_peft_wrote(tmp_path: Path) -> None:
    """The folder holds adapters only; the head comes from the base model."""
    base, out, batch = published(tmp_path, "bert", "pooled"), tmp_path / "out", batch_for("pooled")
    whole = getattr(transformers, base.class_name).from_pretrained(base.name, num_labels=LABELS)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=r".*\.(query|key)", use_rslora=True)
    config.init_lora_weights = False  # B is not zero
    adapters = peft.get_peft_model(whole, config).eval()
    adapters.peft_config["default"].init_lora_weights = True
    adapters.save_pretrained(out)
    options = options_in(out)
    paths = ["attention.self.key", "attention.self.query"]
    assert (options["rslora"], options["target_modules"]) == (True, paths)
    model = SplitModel(LoraSpec(cast(ModelSpec, base), **options), VOCABULARY).eval()
    begin_with(out, LoraSpec(cast(ModelSpec, base), **options), model.state_dict())
    expected = own_loss("pooled", adapters, batch).item()
    assert (model.loss(batch, KEY) / batch.num_targets).item() == pytest.approx(expected, abs=1e-5)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _with_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        fields = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**fields, **changes}))

    return change


def _with_half_of_the_weights_file(path: Path) -> None:
    content = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[: len(content) // 2])


def _with_pickled_weights(path: Path) -> None:
    (path / WEIGHTS).unlink()
    torch.save({}, path / "adapter_model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "needs adapter_config.json and adapter_model.safetensors"),
        (_with_pickled_weights, "pickles are not read"),
        (_with_half_of_the_weights_file, "needs adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("[1]"), "needs adapter_config.json"),
        (lambda path: (path / CONFIG).write_text("{"), "needs adapter_config.json"),
        (_with_config(use_dora=True), "use_dora=True"),
        (_with_config(peft_type="LOHA"), "peft_type=LOHA"),
        (_with_config(bias="all"), "bias=all"),
        (_with_config(init_lora_weights="pissa"), "init_lora_weights=pissa"),
        (_with_config(rank_pattern={"q_proj": 4}), "rank_pattern="),
        (_with_config(r=0), "has r=0, which must be above 0"),
        (_with_config(lora_alpha=None), "has lora_alpha=None, which"),
        (lambda path: save_file({"odd": torch.ones(1)}, path / WEIGHTS), "no LoRA adapters"),
    ],
)
def test_an_invalid_adapter_folder_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    spec, out = adapted(tmp_path, "llama", "causal"), tmp_path / "out"
    write_adapter(spec, VOCABULARY, trained(spec).state_dict(), out)
    change(out)
    with pytest.raises(ConfigError, match=rf"^adapter\.path={out}: .*{message}") as caught:
        options_in(out)
    assert "\n" not in str(caught.value)


def test_adapters_that_do_not_fit_the_model_are_refused_and_change_no_weight(
    tmp_path: Path,
) -> None:
    """Adapters of another family or width, with a missing or an additional layer, or with NaN."""
    spec, out = adapted(tmp_path, "llama", "causal"), tmp_path / "out"
    model = trained(spec)
    write_adapter(spec, VOCABULARY, model.state_dict(), out)
    found = load_file(out / WEIGHTS)
    other = adapted(tmp_path, "gpt2", "causal")
    with pytest.raises(ConfigError, match=r"lacks transformer\.h\.0"):
        begin_with(out, other, trained(other).state_dict())
    name = next(iter(found))
    before = {key: each.clone() for key, each in model.state_dict().items()}
    for changed, message in (
        ({**found, name: found[name][:, 1:].contiguous()}, "has another size of model"),
        ({key: each for key, each in found.items() if key != name}, f"lacks {name[17:]}"),
        ({**found, name: found[name] * torch.nan}, "not finite"),
        ({**found, "base_model.model.odd.lora_A.weight": found[name].clone()}, "has further odd"),
    ):
        save_file(changed, out / WEIGHTS)
        with pytest.raises(ConfigError, match=message) as caught:
            begin_with(out, spec, model.state_dict())
        assert "\n" not in str(caught.value)
    assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())


def test_a_warning_names_the_base_model_of_adapters_trained_on_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last part of the name counts: the model's folder may have been moved."""
    spec, out = adapted(tmp_path, "llama", "causal"), tmp_path / "out"
    model = trained(spec)
    write_adapter(spec, VOCABULARY, model.state_dict(), out)
    for name, warned in (("/moved/to/llama", False), ("somebody/mistral", True)):
        _with_config(base_model_name_or_path=name)(out)
        caplog.clear()
        begin_with(out, spec, model.state_dict())
        assert any(f"was trained on {name}" in text for text in caplog.messages) == warned


def test_an_adapter_folder_needs_a_published_whole_base_model(tmp_path: Path) -> None:
    """A base model with random weights or fewer layers is refused, and so is a model without
    adapters."""
    bert = published(tmp_path, "bert", "pooled")
    short = HuggingFaceSpec(bert.name, None, 2, "pooled", pretrained=True)
    drawn = HuggingFaceSpec(bert.name, head="pooled")
    for base, message in ((short, "blocks than"), (drawn, "pretrained=false")):
        spec = LoraSpec(cast(ModelSpec, base))
        with pytest.raises(ConfigError, match=rf"^--adapter: .*{message}"):
            write_adapter(spec, VOCABULARY, trained(spec).state_dict(), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"^--adapter: needs a run with adapter=lora"):
        write_adapter(cast(ModelSpec, bert), VOCABULARY, {}, tmp_path / "out")
