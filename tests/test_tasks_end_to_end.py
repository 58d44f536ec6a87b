"""Each task that has made-up rows: trained in three clusters, scored, and asked."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from federated import grid_of

from collapipe import config
from collapipe.cli.predict import predict_texts
from server_app.training import train

ENCODER = (
    "model.family=bert",
    "+model.config.hidden_size=16",
    "+model.config.num_hidden_layers=2",
    "+model.config.num_attention_heads=2",
    "+model.config.intermediate_size=32",
)
CAUSAL = (
    "model.family=gpt2",
    "model.num_blocks=2",
    "+model.config.n_embd=16",
    "+model.config.n_layer=3",
    "+model.config.n_head=2",
)
SHORT = (
    "model=huggingface",
    "data=synthetic",
    "data.max_eval_samples=40",
    "task.vocabulary=600",
    "task.max_length=32",
    "batch_size=16",
    "optimizer.lr=5.0e-3",
    "optimizer.warmup_steps=0",
    "federation.rounds=2",
    "federation.local_steps=10",
    "federation.eval_every=2",
)
TOPICS = {"cooking", "garden", "music", "sailing"}
TAGS = {"O", "B-PER", "I-PER", "B-LOC", "B-ORG", "I-ORG"}


def trained(run_dir: Path, *overrides: str) -> None:
    """Leave a finished run in the folder."""
    settled = [*SHORT, *overrides, f"hydra.run.dir={run_dir}"]
    settings = config.load_overrides(settled)
    train(grid_of(settings, settled, None), settings)


def metrics(run_dir: Path) -> tuple[str, set[str]]:
    """The metric's name and those beside it, in the summary of a run."""
    metric = json.loads((run_dir / "summary.json").read_text())["metric"]
    return metric["name"], set(metric["extra_metrics"])


def loss_fell(run_dir: Path) -> bool:
    """Whether the last round's loss is below the first one's."""
    loss = json.loads((run_dir / "summary.json").read_text())["train_loss"]
    return bool(loss["last"] < loss["first"])


def answers(run_dir: Path, texts: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What ``collapipe predict`` prints for these texts."""
    capsys.readouterr()
    predict_texts(run_dir, texts, ())
    return capsys.readouterr().out.removesuffix("\n").split("\n")


def test_classification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=classification", *ENCODER)
    assert metrics(tmp_path) == ("accuracy", {"macro-F1"})
    first, empty = answers(tmp_path, ["the oven is on", ""], capsys)
    assert {first, empty} <= TOPICS


def test_ner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=ner", *ENCODER)
    assert metrics(tmp_path) == ("strict F1", {"precision", "recall"})
    assert loss_fell(tmp_path)
    words, characters = answers(tmp_path, ["Tivomar lives in Belodorf", "張三"], capsys)
    assert len(words.split()) == 4
    assert len(characters.split()) == 2
    assert {*words.split(), *characters.split()} <= TAGS


def test_causal_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=causal_lm", *CAUSAL)
    assert metrics(tmp_path) == ("perplexity", set())
    assert loss_fell(tmp_path)
    assert len(answers(tmp_path, ["the small", ""], capsys)) == 2


def test_labels_may_stay_on_the_units(tmp_path: Path) -> None:
    """A task head trains on the control units like an encoder's blocks."""
    trained(tmp_path, "task=ner", *ENCODER, "decoder.mode=control_unit")
    assert metrics(tmp_path)[0] == "strict F1"
    assert loss_fell(tmp_path)
