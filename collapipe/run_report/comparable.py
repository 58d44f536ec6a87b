"""How losses and metrics of a run were measured, as far as its folder shows.

Figures of two runs are compared if these functions return the same for both. Seeds, models and
options of training may differ.
"""

import re

from collapipe.config.resolved import flattened
from collapipe.report import Score
from collapipe.runs.reading import Run

_FEDERATED = "federated"  # the tokeniser is made of the units' words
_OF_TRAINING = "task.train_rows", "data.shuffle", "data.max_train_samples", "data.partitioner"
_OF_TOKENISER = "task.vocabulary", "data.tokenizer"  # and data.tokenizer_min_rows
# a mean over units' own models is compared with the figure of one averaged model
_OWN_MODELS = re.compile(r"\|mean of \d+ units' models$| with models of their own$")


def how_trained(run: Run) -> object:
    """Return how the training loss was measured: by which task, on which data, and per token of
    which tokeniser if the targets are tokens."""
    others = (*_OF_TRAINING, *_OF_TOKENISER, *(["task.max_length"] if run.predicts_labels else []))
    options = flattened({name: run.tree[name] for name in ("task", "data") if name in run.tree})
    counted = {name: value for name, value in options.items() if not name.startswith(others)}
    return counted, None if run.predicts_labels else _tokeniser(run)


def how_validated(run: Run) -> object:
    """Return how the last validation loss was measured: as the training loss, and on which rows."""
    scores = (line.metric for line in reversed(run.rounds) if line.metric)
    return how_trained(run), _signature(next(scores, None))


def how_tested(run: Run) -> object:
    """Return how the test metric was measured: its signature, and the tokeniser that this names."""
    signature = _signature(run.summary.metric if run.summary else None)
    return signature, _tokeniser(run) if "tokeniser" in signature else None


def _signature(score: Score | None) -> str:
    return _OWN_MODELS.sub("", score.signature) if score else ""


def _tokeniser(run: Run) -> object:
    """Return its name, or the options with which it is made of the units' words."""
    own = run.option("model.name") if run.option("model.pretrained") else None
    name = run.option("data.tokenizer") or own or _FEDERATED
    made = run.option("task.vocabulary"), run.option("data.tokenizer_min_rows")
    return made if name == _FEDERATED else name
