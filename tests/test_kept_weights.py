"""Runs with narrow frozen weights have the same bits as with these weights in float32."""

from pathlib import Path

import pytest
import torch
from federated import grid_of, train
from narrow import rounded
from resumed import differing
from run_files import summary_of
from test_devices import STEADY, inventory, lost_devices
from torch import Tensor
from transformers import AutoModelForCausalLM

from collapipe import config
from collapipe.cli.trained.export import export_run
from collapipe.cli.trained.predict import predict_texts
from collapipe.models.frozen import _empty
from collapipe.runs.model import load_model
from tests.device_cluster import daemons

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
OPTIONS = (
    "model=huggingface",
    "model.family=llama",
    "model.num_blocks=2",
    f"model.config={{{', '.join(f'{name}: {size}' for name, size in SIZES.items())}}}",
    "model.dtype=bfloat16",
    "adapter=lora",
    "adapter.rank=2",
    "data=synthetic",
    "data.max_eval_samples=8",
    "task=causal_lm",
    "task.vocabulary=300",
    "task.max_length=16",
    "batch_size=6",
    "optimizer.lr=5.0e-2",
    "optimizer.warmup_steps=0",
    "pipeline.num_micro_batches=2",
    "federation.num_units=1",
    "federation.rounds=2",
    "federation.local_steps=2",
    "federation.checkpoint_every=1",
    *STEADY,
)


def run(run_dir: Path, *options: str, resume: str | None = None) -> dict[str, Tensor]:
    settings = config.load_overrides([*OPTIONS, *options, f"hydra.run.dir={run_dir}"])
    train(grid_of(settings), settings, resume)
    return dict(load_model(run_dir)[1].state_dict())


def wide(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.float() for name, each in weights.items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["decoder.mode=per_cluster"], marks=pytest.mark.thorough),
        pytest.param(
            ["decoder.mode=control_unit", "adapter.last_blocks=1", "evaluation.where=both"],
            marks=pytest.mark.thorough,
        ),
        ["model.quantization=int8", "pipeline.dtype=float64"],
        pytest.param(["framework=vanilla_fl"], marks=pytest.mark.thorough),
        pytest.param(["framework.cut=1"], marks=pytest.mark.thorough),
        pytest.param(["decoder.mode=control_unit", "privacy=private"], marks=pytest.mark.thorough),
    ],
    ids=lambda options: options[-1],
)
def test_narrow_weights_train_like_rounded_float32_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    found = run(tmp_path / "kept", *options)
    frozen = {name for name, each in found.items() if each.dtype.itemsize < 4}
    assert frozen
    assert not any("lora" in name for name in frozen)
    monkeypatch.setattr("collapipe.models.lora.keep", rounded)
    _empty.cache_clear()  # forms differ although the options are equal
    expected = run(tmp_path / "wide", *options)
    _empty.cache_clear()
    assert all(each.dtype.itemsize >= 4 for each in expected.values())
    trained = [{n: w for n, w in each.items() if "lora" in n} for each in (found, expected)]
    assert trained[0]
    assert differing(*trained) == []
    losses = [summary_of(tmp_path / n) for n in ("kept", "wide")]
    assert losses[0]["train_loss"] == losses[1]["train_loss"]
    assert losses[0]["test_loss"] == losses[1]["test_loss"]


@pytest.mark.thorough
def test_a_run_on_daemons_has_the_same_bits(tmp_path: Path) -> None:
    quantised = "model.quantization=nf4"
    with daemons(2) as there:
        file = inventory(tmp_path / "here.yaml", there)
        chosen = "cluster=devices", f"cluster.file={file}", quantised
        real = run(tmp_path / "real", *chosen)
        assert lost_devices(tmp_path / "real") == set()
    simulated = run(tmp_path / "simulated", "cluster=file", f"cluster.file={file}", quantised)
    assert differing(wide(real), wide(simulated)) == []


@pytest.mark.parametrize("quantization", [pytest.param("null", marks=pytest.mark.thorough), "nf4"])
def test_a_run_with_narrow_weights_can_resume_predict_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: str
) -> None:
    whole = run(tmp_path / "whole", f"model.quantization={quantization}")
    again = run(tmp_path / "whole", f"model.quantization={quantization}", resume="000001")
    assert differing(wide(again), wide(whole)) == []
    predict_texts(tmp_path / "whole", [["the small"]], ())
    assert capsys.readouterr().out
    export_run(tmp_path / "whole", tmp_path / "out", ())
    precision = {"null": "bfloat16", "nf4": "nf4"}[quantization]
    assert f"kept in {precision}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {each.dtype for each in model.parameters()} == {torch.float32}
