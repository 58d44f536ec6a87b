"""Each task with synthetic rows is trained in three clusters, evaluated and used to predict."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from federated import grid_of, train
from run_files import summary_of

from collapipe import config
from collapipe.cli.trained.predict import evaluate_file, predict_texts
from collapipe.errors import ConfigError

ENCODER = (
    "model.family=bert",
    "model.config={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 32}",
)
CAUSAL = (
    "model.family=gpt2",
    "model.num_blocks=2",
    "model.config={n_embd: 16, n_layer: 3, n_head: 2}",
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
    "federation.local_steps=5",
    "federation.eval_every=2",
)
TOPICS = {"cooking", "garden", "music", "sailing"}
TAGS = {"O", "B-PER", "I-PER", "B-LOC", "B-ORG", "I-ORG"}


def trained(run_dir: Path, *overrides: str) -> None:
    """Leave a finished run in the folder."""
    settled = [*SHORT, *overrides, f"hydra.run.dir={run_dir}"]
    settings = config.load_overrides(settled)
    train(grid_of(settings), settings)


def metrics(run_dir: Path) -> tuple[str, set[str]]:
    """The names of the metric and of the extra metrics in a run's summary."""
    metric = summary_of(run_dir)["metric"]
    return metric["name"], set(metric["extra_metrics"])


def loss_fell(run_dir: Path) -> bool:
    """Whether the last round's loss is below the first one's."""
    loss = summary_of(run_dir)["train_loss"]
    return bool(loss["last"] < loss["first"])


def answers(
    run_dir: Path, texts: Sequence[str], capsys: pytest.CaptureFixture[str], **options: Any
) -> list[str]:
    """The lines that ``collapipe predict`` prints for these texts."""
    capsys.readouterr()
    predict_texts(run_dir, [texts], (), **options)
    return capsys.readouterr().out.removesuffix("\n").split("\n")


@pytest.mark.thorough
def test_classification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=classification", *ENCODER)
    assert metrics(tmp_path) == ("accuracy", {"macro-F1"})
    first, empty = answers(tmp_path, ["the oven is on", ""], capsys)
    assert {first, empty} <= TOPICS
    label, probability = answers(tmp_path, ["the oven is on"], capsys, scores=True)[0].split("\t")
    found = json.loads(answers(tmp_path, ["the oven is on"], capsys, as_json=True)[0])
    assert label == found["prediction"] == first
    assert set(found["probabilities"]) == TOPICS
    assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert found["probability"] == max(found["probabilities"].values())
    assert float(probability) == pytest.approx(found["probability"], rel=1e-3)
    assert evaluated(tmp_path, capsys) == summary(tmp_path)


def summary(run_dir: Path) -> dict[str, float]:
    """The metrics of a run's test rows."""
    metric = summary_of(run_dir)["metric"]
    return {metric["name"]: metric["value"], **metric["extra_metrics"]}


def evaluated(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """The metrics that ``collapipe evaluate`` prints for a file with the run's test rows."""
    settings = config.load_saved(run_dir / "config.yaml")
    file = run_dir / "rows.jsonl"
    rows = settings.task.splits(settings.seed).test.select(range(40))
    if "tags" in rows.column_names:
        rows = rows.rename_column("tags", "ner_tags")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    evaluate_file(run_dir, file, (), None, as_json=True)
    found: dict[str, float] = json.loads(capsys.readouterr().out)["metrics"]
    return found


def test_ner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=ner", *ENCODER)
    assert metrics(tmp_path) == ("strict F1", {"precision", "recall"})
    assert loss_fell(tmp_path)
    words, characters = answers(tmp_path, ["Tivomar lives in Belodorf", "張三"], capsys)
    assert len(words.split()) == 4
    assert len(characters.split()) == 2
    assert {*words.split(), *characters.split()} <= TAGS
    found = json.loads(answers(tmp_path, ["Tivomar lives"], capsys, as_json=True)[0])
    assert len(found["probability"]) == len(found["probabilities"]) == 2
    assert all(sum(each.values()) == pytest.approx(1, abs=1e-5) for each in found["probabilities"])
    assert evaluated(tmp_path, capsys) == summary(tmp_path)
    (file := tmp_path / "other.jsonl").write_text('{"tokens": ["Ana"], "ner_tags": ["B-XXX"]}\n')
    with pytest.raises(ConfigError, match=rf"^{file}: .*row 1"):
        evaluate_file(tmp_path, file, (), None, as_json=True)


@pytest.mark.thorough
def test_causal_lm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "task=causal_lm", *CAUSAL)
    assert metrics(tmp_path) == ("perplexity", {"token accuracy"})
    assert loss_fell(tmp_path)
    assert evaluated(tmp_path, capsys) == summary(tmp_path)
    texts = ["the small", ""]
    one = answers(tmp_path, texts, capsys)
    assert len(one) == 2
    assert answers(tmp_path, texts, capsys, max_new_tokens=1) == one
    more = answers(tmp_path, texts, capsys, max_new_tokens=5)
    assert all(text.startswith(first) for text, first in zip(more, one, strict=True))
    alone = [answers(tmp_path, [text], capsys, max_new_tokens=40)[0] for text in texts]
    assert answers(tmp_path, texts, capsys, max_new_tokens=40) == alone  # beyond max_length
    found = [json.loads(line) for line in answers(tmp_path, texts, capsys, as_json=True)]
    assert [each["prediction"] for each in found] == one
    assert all(each["log_probability"] < 0 for each in found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "task", ["classification", pytest.param("ner", marks=pytest.mark.thorough), "causal_lm"]
)
def test_evaluation_on_units_equals_evaluation_on_the_server(tmp_path: Path, task: str) -> None:
    """Each unit evaluates on its part of the same rows. Another test covers translation."""
    model = CAUSAL if task == "causal_lm" else ENCODER
    short = "federation.local_steps=2", "data.max_eval_samples=20", "federation.num_units=2"
    trained(tmp_path, f"task={task}", *model, *short, "evaluation.where=both")
    found = summary_of(tmp_path)
    on_units = found["on_units"]
    assert on_units["rows"] == {"0": 10, "1": 10}
    assert on_units["loss"] == found["test_loss"]
    for name in ("name", "value", "extra_metrics"):
        assert on_units["metric"][name] == found["metric"][name]


def test_labels_may_stay_on_the_units(tmp_path: Path) -> None:
    """A task head trains on the control units like an encoder's blocks."""
    trained(tmp_path, "task=ner", *ENCODER, "decoder.mode=control_unit")
    assert metrics(tmp_path)[0] == "strict F1"
    assert loss_fell(tmp_path)
