"""Runs with blocks on the server have the weights of runs with all blocks on the units."""

from pathlib import Path

import pytest
import torch
from federated import TINY, UNEVEN, grid_of, run, train, weights
from huggingface import folder, without_dropout
from safetensors.torch import load_file
from torch import Tensor

from collapipe import config
from collapipe.cli.trained.export import export_run
from collapipe.cli.trained.predict import predict_texts
from collapipe.runs.model import load_model

EXACT = ("pipeline.dtype=float64", "model.dropout=0", UNEVEN)
TEXTS = ["Dienstag", "Montag, 14:05"]


def uncut(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under their names in the model without a cut."""
    return {name.removeprefix("head."): weight for name, weight in weights.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        ("framework.cut=3", "pipeline.num_segments=2", "model.norm=post"),
        pytest.param(
            ("framework.cut=1", "optimizer=sgd", "optimizer.clip_norm=0.1"),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            ("framework.cut=1", "decoder.mode=shared", "federation.num_units=1"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_splitfed_has_the_weights_and_predictions_of_collapipe(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    options = *options, "federation.local_steps=1"
    cut = run(tmp_path / "cut", "framework=splitfed", *EXACT, *options)
    whole = run(tmp_path / "whole", *EXACT, *options, "framework.cut=null")
    assert_close(uncut(cut), whole, 1e-9)
    assert len(load_model(tmp_path / "cut")[1].blocks) == int(options[0].partition("=")[2])
    capsys.readouterr()
    printed = []
    for name in ("cut", "whole"):
        predict_texts(tmp_path / name, [TEXTS], ())
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.thorough), "lora"])
def test_a_cut_does_not_change_the_export_of_t5(tmp_path: Path, adapter: str) -> None:
    """T5's bias table crosses the link. The run uses float32, because T5 computes its norms in
    float32; adapters are merged."""
    name = folder(tmp_path, "t5", **without_dropout("t5"))
    options = [option for option in TINY if not option.startswith("model.")]
    options += ["model=huggingface", f"model.name={name}", "task.max_length=18", "optimizer=sgd"]
    options += ["federation.rounds=1", "federation.num_units=1"]
    exported = []
    for cut in ("1", "null"):
        run_dir, out = tmp_path / cut, tmp_path / f"{cut}-out"
        settled = [*options, f"adapter={adapter}", f"framework.cut={cut}"]
        settled += [f"hydra.run.dir={run_dir}"]
        settings = config.load_overrides(settled)
        train(grid_of(settings), settings)
        export_run(run_dir, out, ())
        exported.append(load_file(out / "model.safetensors"))
    assert_close(exported[0], exported[1], 1e-5)
    table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert any(table in key for key in exported[0])
    if adapter == "none":
        assert_close(uncut(weights(tmp_path / "1")), weights(tmp_path / "null"), 1e-5)
