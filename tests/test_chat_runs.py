"""Runs from a file of conversations to a trained, scored and exported model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import PLAIN, messages, write
from federated import grid_of, train
from run_files import summary_of
from transformers import AutoTokenizer

from collapipe import config
from collapipe.cli.trained.export import export_run
from collapipe.cli.trained.predict import evaluate_file, predict_texts
from collapipe.config import load_overrides
from collapipe.errors import ConfigError
from collapipe.runs.model import load_model
from collapipe.text.chat_template import Renderer

LLAMA = (
    "model=huggingface",
    "model.family=llama",
    "model.config={num_hidden_layers: 3, hidden_size: 16, num_attention_heads: 2, "
    "num_key_value_heads: 1, intermediate_size: 16}",
    "model.num_blocks=2",
)
SHORT = (
    "task=chat",
    "data.tokenizer=bytes",
    "task.max_length=120",
    "batch_size=3",
    "pipeline.num_micro_batches=2",
    "optimizer.lr=1.0e-2",
    "optimizer.warmup_steps=0",
    "federation.num_units=2",
    "federation.rounds=2",
    "federation.local_steps=4",
    "federation.checkpoint_every=0",
    "evaluation.where=units",
)


def conversations(folder: Path) -> list[str]:
    """Write rows of conversations and a template; return their options."""
    numbers = [messages(f"Say {n}.", f"It is {n}.", "Again.", "No.") for n in range(24)]
    rows = write(folder / "rows.jsonl", [{"messages": each} for each in numbers])
    (folder / "own.jinja").write_text(PLAIN.replace("'<|end|>'", "eos_token"))
    options = [f"data.{split}_file={rows}" for split in ("train", "validation", "test")]
    return [*options, f"task.chat_template={folder / 'own.jinja'}"]


def trained(run_dir: Path, *options: str) -> dict[str, Any]:
    """Train, and return the run's summary."""
    settings = config.load_overrides([*LLAMA, *SHORT, *options, f"hydra.run.dir={run_dir}"])
    train(grid_of(settings), settings)
    summary: dict[str, Any] = summary_of(run_dir)
    return summary


def test_conversations_train_and_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is on the server. The run keeps its template: the file is deleted after training."""
    options = conversations(tmp_path)
    summary = trained(run_dir := tmp_path / "run", *options)
    assert summary["train_loss"]["last"] < summary["train_loss"]["first"]
    assert summary["on_units"]["metric"]["name"] == "perplexity"
    accuracy = summary["on_units"]["metric"]["extra_metrics"]["token accuracy"]
    assert 0 < accuracy < 1
    assert 0 < summary["input_tokens"] <= 2 * 2 * 4 * 3 * 120
    shown = capsys.readouterr().out
    assert "token accuracy" in shown
    assert len(re.findall(r"^round \d/2 .* [\d,]+ tokens/s", shown, re.MULTILINE)) == 2
    assert re.search(r"^speed +[\d,]+ tokens/s", shown, re.MULTILINE)
    assert "samples/s" not in shown
    (tmp_path / "own.jinja").unlink()
    predict_texts(run_dir, [["Say 3."]], ())
    evaluate_file(run_dir, tmp_path / "rows.jsonl", (), None, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["metrics"]["token accuracy"] == pytest.approx(accuracy, abs=0.02)
    assert found["metrics"]["perplexity"] == pytest.approx(
        summary["on_units"]["metric"]["value"], rel=1e-3
    )
    export_run(run_dir, tmp_path / "exported", ())
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    known = load_model(run_dir)[2]
    assert known.chat_template is not None
    talk = [*map(dict, messages("A?", "b"))]
    ((text, _),) = Renderer(known.chat_template).answers([talk])
    assert exported.apply_chat_template(talk, tokenize=False) == text
    ids = exported.apply_chat_template(talk, return_dict=False)
    assert ids == known.encode_chat([text])[0][0].tolist() == exported(text)["input_ids"]


@pytest.mark.thorough
def test_packed_conversations_train_like_unpacked_ones(tmp_path: Path) -> None:
    """A batch has all conversations, so that all runs take the same steps up to rounding."""
    options, found = conversations(tmp_path), []
    for name, more in (
        ("packed", ()),
        ("apart", ("task.packing=false", "batch_size=24")),
        ("devices", ("decoder.mode=control_unit",)),
    ):
        one = "federation.num_units=1", "batch_size=24", "federation.rounds=1"
        summary = trained(tmp_path / name, *options, *one, *more)
        model = load_model(tmp_path / name)[1]
        found.append((summary["train_loss"]["last"], model.state_dict()))
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-4)
        torch.testing.assert_close(weights, found[0][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "model", [("model.family=gpt2",), ("model.family=qwen3_5_text",)], ids=["gpt2", "mixing"]
)
def test_the_error_for_models_that_cannot_pack_names_the_option(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    options = ["task=chat", "model=huggingface", *model, *conversations(tmp_path)]
    with pytest.raises(ConfigError, match=r"task\.packing=true: .*set task\.packing=false"):
        load_overrides(options)
    load_overrides([*options, "task.packing=false"])
