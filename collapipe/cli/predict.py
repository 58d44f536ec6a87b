"""``collapipe predict``: a run's model on a user's own inputs."""

from collections.abc import Sequence
from pathlib import Path

from collapipe.run_folder import load_model


def predict_texts(run_dir: Path, texts: Sequence[str], trusted: Sequence[str]) -> None:
    """Print a line per text. ``trusted`` packages may hold the run's task and model."""
    settings, model, tokenizer = load_model(run_dir, trusted)
    if not texts:
        return
    task = settings.task
    generated = model.generate(task.inputs(texts, tokenizer), task.max_length)
    for text in task.decode(generated, tokenizer):
        print(text)
