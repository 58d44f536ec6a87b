"""A model of transformers in an inventory: by folder, by family, and what cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface import folder, spec_of

from collapipe.devices.hardware import transformer_block_cost
from collapipe.errors import ConfigError
from collapipe.inventory.file import Inventory, read_inventory
from collapipe.models.cost import measure_cost
from collapipe.models.huggingface.spec import HuggingFaceSpec

CLUSTERS = "clusters: [{name: shop, devices: [{name: a, flops_per_s: 1e9, memory_bytes: 1e6}]}]\n"
ROOT = Path(__file__).parents[3]


def test_a_folder_beside_the_inventory_is_counted(tmp_path: Path) -> None:
    cost = measure_cost(spec_of(tmp_path, "t5", "decoder"), 9, 8)
    inventory = read(tmp_path, "{name: t5, tokens: 9}")
    (device,) = inventory.clusters[0].profiles
    assert (inventory.model.num_blocks, inventory.model.block_bytes) == (4, cost.block_bytes)
    assert device.time.u == (cost.forward_flops + cost.backward_flops) / 1e9
    assert device.max_blocks == 1e6 // cost.block_bytes


def test_the_run_may_change_the_configuration(tmp_path: Path) -> None:
    folder(tmp_path, "gpt2")
    inventory = read(
        tmp_path,
        "{name: ./gpt2, num_blocks: 2, config: {n_embd: 24, layer_norm_epsilon: 1e-6, "
        "activation_function: relu, scale_attn_weights: false}}",
    )
    fields = {"n_embd": 24, "layer_norm_epsilon": 1e-6, "activation_function": "relu"}
    spec = HuggingFaceSpec(
        str(tmp_path / "gpt2"), num_blocks=2, config={**fields, "scale_attn_weights": False}
    )
    assert inventory.model.num_blocks == 2
    assert inventory.model.block_bytes == measure_cost(spec, 64, 8).block_bytes


def test_a_task_has_sizes_of_its_own(tmp_path: Path) -> None:
    """Those that a run of the task trains, laid over the model's."""
    sizes = yaml.safe_load((ROOT / "conf/task_model/dates_transformer.yaml").read_text())
    inventory = read(tmp_path, "{name: dates_transformer, tokens: 9}")
    counted = transformer_block_cost(sizes["dim"], sizes["feed_forward_dim"], 9, 8)
    assert inventory.model.num_blocks == 6
    assert inventory.model.block_bytes == counted.block_bytes


def test_a_family_needs_no_name(tmp_path: Path) -> None:
    inventory = read(tmp_path, "{family: bert, config: {num_hidden_layers: 3}, block_bytes: 7e7}")
    assert (inventory.model.num_blocks, inventory.model.block_bytes) == (3, 7e7)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("{name: bert, num_blocks: 5}", ":2: model.num_blocks=5: "),
        ("{name: bert, family: gpt2}", ":2: model.family=gpt2: "),
        ("{name: bert, config: {hiden_size: 8}}", ":2: model.config.hiden_size: a bert has no"),
        ("{name: bert, config: {hidden_size: [8]}}", "config.hidden_size: must be a text"),
        ("{name: bert, config: {hidden_size: 17}}", "transformers cannot build a bert"),
        ("{name: bert, tokens: 0}", ":2: model.tokens=0: must be at least 1"),
        ("{name: nobody/nothing}", "model.name=nobody/nothing: neither a folder with"),
        ("{name: transformers}", "model.name=transformers: no model of conf/model/; nearest: tran"),
        ("{name: huggingface}", "model.name=huggingface: huggingface has no sizes; name the"),
        ("{name: transformer, family: t5}", "model.family=t5: transformer of conf/model/ has no"),
        ("{num_blocks: 4, tokens: 9}", "model.tokens=9: belongs to a model by name"),
        ("{family: mamba}", "model.family; supported families: bert, "),
    ],
)
def test_what_cannot_be_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("bert", "gpt2"):
        folder(tmp_path, name)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, model)
    assert str(refused.value).startswith(f"{tmp_path / 'inventory.yaml'}:2: ")
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


def test_only_a_named_model_waits_for_torch() -> None:
    source = (
        "import pathlib, sys; from collapipe.inventory.file import read_inventory as read; "
        "read(pathlib.Path('docs/examples/workshop.yaml')); assert 'torch' not in sys.modules; "
        "read(pathlib.Path('docs/examples/bert-base.yaml')); assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)


def read(folder: Path, model: str) -> Inventory:
    path = folder / "inventory.yaml"
    path.write_text(f"batch_size: 8\nmodel: {model}\n{CLUSTERS}", encoding="utf-8")
    return read_inventory(path)
