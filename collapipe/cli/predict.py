"""``collapipe predict``: a run's model on a user's own inputs."""

import re
from collections.abc import Sequence
from pathlib import Path

from collapipe.runs.model import load_model

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a stranger's labels may hold them


def predict_texts(
    run_dir: Path, texts: Sequence[str], trusted: Sequence[str], unit: int | None = None
) -> None:
    """Print a line per text. ``trusted`` packages may hold the run's task and model; ``unit``
    says whose model it is where each unit has one."""
    settings, model, tokenizer = load_model(run_dir, trusted, unit)
    if not texts:
        return
    task = settings.task
    inputs = task.inputs(texts, tokenizer)
    generated = model.generate(inputs.batch(range(len(texts))), task.max_length)
    for text in inputs.decode(generated):
        print(_CONTROL.sub(" ", text))
