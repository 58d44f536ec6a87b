"""An inventory names a transformers model by folder or by family."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface import folder, spec_of

from collapipe.devices.hardware import transformer_block_cost
from collapipe.errors import ConfigError
from collapipe.inventory.file import Inventory, read_inventory
from collapipe.inventory.model import read_spec
from collapipe.models.cost import measure_cost
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.lora import LoraSpec
from collapipe.state import AffineLaw

DEVICE = "flops_per_s: 1e9, memory_bytes: 1e6"
ROOT = Path(__file__).parents[3]


def test_the_cost_of_a_model_folder_next_to_the_inventory_is_measured(tmp_path: Path) -> None:
    cost = measure_cost(spec_of(tmp_path, "t5", "decoder"), 9, 8)
    inventory = read(tmp_path, "{name: t5, tokens: 9}")
    (device,) = inventory.clusters[0].profiles
    assert (inventory.model.num_blocks, inventory.model.block_bytes) == (4, cost.block_bytes)
    assert device.time.u == (cost.forward_flops + cost.backward_flops) / 1e9
    assert device.memory_cap(1, 99) == 1e6 // cost.block_bytes


def test_the_inventory_can_override_the_models_configuration(tmp_path: Path) -> None:
    folder(tmp_path, "gpt2")
    inventory = read(
        tmp_path,
        "{name: ./gpt2, num_blocks: 2, tokens: 9, config: {n_embd: 24, layer_norm_epsilon: 1e-6, "
        "activation_function: relu, scale_attn_weights: false}}",
    )
    fields = {"n_embd": 24, "layer_norm_epsilon": 1e-6, "activation_function": "relu"}
    spec = HuggingFaceSpec(
        str(tmp_path / "gpt2"), num_blocks=2, config={**fields, "scale_attn_weights": False}
    )
    assert inventory.model.num_blocks == 2
    assert inventory.model.block_bytes == measure_cost(spec, 9, 8).block_bytes


def test_a_tasks_model_has_the_tasks_sizes(tmp_path: Path) -> None:
    """The task's sizes override the model's defaults, as in a run of the task."""
    sizes = yaml.safe_load((ROOT / "conf/task_model/dates_transformer.yaml").read_text())
    inventory = read(tmp_path, "{name: dates_transformer, tokens: 9}")
    counted = transformer_block_cost(sizes["dim"], sizes["feed_forward_dim"], 9, 8)
    assert inventory.model.num_blocks == 6
    assert inventory.model.block_bytes == counted.block_bytes


def test_a_model_can_be_given_by_its_family_alone(tmp_path: Path) -> None:
    inventory = read(tmp_path, "{family: bert, config: {num_hidden_layers: 3}, block_bytes: 7e7}")
    assert (inventory.model.num_blocks, inventory.model.block_bytes) == (3, 7e7)


def test_a_plan_counts_recomputation_and_the_wire_dtype_as_a_run_does(tmp_path: Path) -> None:
    """Recomputation and the wire dtype change a measured device's time, memory and energy."""
    folder(tmp_path, "t5")
    device = "chunk: {u: 2.0, v: 3.0, w: 4.0, l: 5.0}, memory_bytes: 1e6, energy_j: 9, power_w: 7"
    (plain,) = read(tmp_path, "{name: t5, tokens: 9}", device).clusters[0].profiles
    section = "pipeline: {recompute: true, wire_dtype: int8}\n"
    inventory = read(tmp_path, "{name: t5, tokens: 9}", device, section)
    (changed,) = inventory.clusters[0].profiles
    cost = measure_cost(spec_of(tmp_path, "t5", "decoder"), 9, 8, recompute=True)
    times, dim = 1 + cost.forward_share, spec_of(tmp_path, "t5", "decoder").dim
    assert inventory.model.cost == cost
    assert changed.time == AffineLaw(2 * times, 3 * times, 4 * (dim + 4) / (4 * dim), 5.0)
    assert changed.memory is not None and changed.memory.sample_bytes == cost.sample_bytes
    assert plain.energy is not None and changed.energy is not None
    assert changed.energy == replace(
        plain.energy, law=plain.energy.law.taking(times, sent=(dim + 4) / (4 * dim))
    )


def test_adapters_are_counted_as_in_a_run(tmp_path: Path) -> None:
    """Frozen weights need less memory than trained weights."""
    base = spec_of(tmp_path, "llama", "causal")
    section = "adapter: {name: lora, rank: 3, target_modules: [o_proj]}\n"
    whole = read(tmp_path, "{name: llama, num_blocks: 3, tokens: 9}").model
    adapted = read(tmp_path, "{name: llama, num_blocks: 3, tokens: 9}", more=section).model
    spec = LoraSpec(base, 3, target_modules=("o_proj",))
    assert adapted.cost == measure_cost(spec, 9, 8) != whole.cost
    assert whole.end_bytes[0] == 4 * adapted.end_bytes[0]
    own = read(tmp_path, "{name: dates_transformer, tokens: 9}", more="adapter: {name: lora}\n")
    assert own.model.cost == measure_cost(read_spec(own.document, own.section), 9, 8)


def test_the_dtype_of_the_models_files_does_not_change_training_costs(tmp_path: Path) -> None:
    models = []
    for dtype in ("float32", "bfloat16"):
        (own := tmp_path / dtype).mkdir()
        folder(own, "llama", torch_dtype=dtype)
        models.append(read(own, "{name: llama, tokens: 9}").model)
    assert models[0] == models[1]


def test_block_bytes_depend_on_how_frozen_weights_are_stored(tmp_path: Path) -> None:
    """Frozen weights have the dtype of the model's files, another dtype, or are quantised."""
    folder(tmp_path, "llama", torch_dtype="bfloat16")

    def block_bytes(kept: str) -> float:
        model = read(
            tmp_path, f"{{name: llama, tokens: 9{kept}}}", more="adapter: {name: lora}\n"
        ).model
        assert model.block_bytes is not None
        return model.block_bytes

    sizes = [block_bytes(f", {kept}") for kept in ("quantization: nf4", "quantization: int8")]
    sizes += [block_bytes(kept) for kept in ("", ", dtype: float32")]
    assert sizes == sorted({*sizes})
    assert block_bytes(", dtype: bfloat16") == sizes[2]
    for kept in ("dtype: bfloat16", "quantization: nf4"):
        with pytest.raises(ConfigError, match=f"model.{kept[:5]}.*add adapter"):
            read(tmp_path, f"{{name: llama, {kept}}}", more="pipeline: {}\n")


def test_the_cost_of_a_model_of_conf_is_measured_on_its_block(tmp_path: Path) -> None:
    inventory = read(tmp_path, "{name: dates_transformer, tokens: 9}", more="pipeline: {}\n")
    spec = read_spec(inventory.document, inventory.section)
    assert inventory.model.cost == measure_cost(spec, 9, 8)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("pipeline: {recompute: yes}", "pipeline.recompute=yes: must be true, false or auto"),
        ("pipeline: {wire_dtype: int4}", "pipeline.wire_dtype=int4: "),
        (
            "pipeline: {recomputes: true}",
            "pipeline.recomputes=true: unknown key; nearest: recompute",
        ),
        ("adapter: {rank: 8}", "adapter.name: "),
        ("adapter: {name: dora}", "adapter.name=dora: "),
        ("adapter: {name: lora, rank: 0}", "adapter.rank=0: must be at least 1"),
        (
            "adapter: {name: lora, target_modules: [o_prj]}",
            ":4: adapter.target_modules=o_prj: no block has",
        ),
    ],
)
def test_invalid_pipeline_and_adapter_options_are_refused(
    tmp_path: Path, section: str, message: str
) -> None:
    folder(tmp_path, "llama")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, "{name: llama}", more=f"{section}\n")


def test_pipeline_and_adapter_sections_need_a_named_model(tmp_path: Path) -> None:
    for key, options in ("pipeline", "{recompute: true}"), ("adapter", "{name: lora}"):
        with pytest.raises(ConfigError, match=f":4: {key}: is counted on a block"):
            read(tmp_path, "{num_blocks: 4}", "chunk: {u: 1.0}", f"{key}: {options}\n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: bert, num_blocks: 5}", ":2: model.num_blocks=5: "),
        ("{name: bert, family: gpt2}", ":2: model.family=gpt2: "),
        ("{name: bert, config: {hiden_size: 8}}", ":2: model.config.hiden_size: a bert has no"),
        ("{name: bert, config: {hidden_size: [8]}}", "config.hidden_size: must be a text"),
        ("{name: bert, config: {hidden_size: 17}}", "transformers cannot build a bert"),
        ("{name: bert, tokens: 10000}", ":2: model.tokens=10000: this bert has positions for"),
        ("{family: gpt2, tokens: 2000}", ":2: model.tokens=2000: this gpt2 has positions for"),
        ("{name: bert, tokens: 0}", ":2: model.tokens=0: must be at least 1"),
        ("{name: nobody/nothing}", "model.name=nobody/nothing: must be a folder with"),
        ("{name: transformers}", "model.name=transformers: no model of conf/model/; nearest: tran"),
        ("{name: huggingface}", "model.name=huggingface: huggingface has no sizes; name the"),
        ("{name: transformer, family: t5}", "model.family=t5: transformer of conf/model/ has no"),
        ("{num_blocks: 4, tokens: 9}", "model.tokens=9: belongs to a model by name"),
        ("{family: mamba}", ":2: model.family=mamba: cannot be taken apart ("),
    ],
)
def test_an_impossible_model_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("bert", "gpt2"):
        folder(tmp_path, name)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, model)
    assert str(refused.value).startswith(f"{tmp_path / 'inventory.yaml'}:2: ")
    assert message in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.thorough
def test_torch_is_imported_only_for_a_named_transformers_model() -> None:
    source = (
        "import pathlib, sys; from collapipe.inventory.file import read_inventory as read; "
        "read(pathlib.Path('docs/examples/workshop.yaml')); assert 'torch' not in sys.modules; "
        "read(pathlib.Path('docs/examples/bert-base.yaml')); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)


def read(folder: Path, model: str, device: str = DEVICE, more: str = "") -> Inventory:
    path = folder / "inventory.yaml"
    clusters = f"clusters: [{{name: shop, devices: [{{name: a, {device}}}]}}]\n"
    path.write_text(f"batch_size: 8\nmodel: {model}\n{clusters}{more}", encoding="utf-8")
    return read_inventory(path)
