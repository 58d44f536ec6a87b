"""The global model on rows that no unit trains on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from datasets import Dataset

from collapipe.errors import NonFiniteLossError
from collapipe.models.split import Head, SplitModel
from collapipe.tasks.prediction import rows_at_once
from collapipe.tasks.task import Score, Task
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss per target token, and the task's metric."""

    loss: float
    score: Score


def mean_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Of several models: the mean of their losses and values, and a signature that says so."""
    first, count = evaluations[0].score, len(evaluations)
    extra_metrics = {
        name: sum(each.score.extra_metrics[name] for each in evaluations) / count
        for name in first.extra_metrics
    }
    score = Score(
        first.name,
        sum(each.score.value for each in evaluations) / count,
        f"{first.signature}|mean of {count} units' models",
        extra_metrics,
    )
    return Evaluation(sum(each.loss for each in evaluations) / count, score)


class Evaluator:
    """Evaluates on fixed rows, sorted by length so that a batch is padded little."""

    def __init__(self, task: Task, rows: Dataset, tokenizer: Tokenizer) -> None:
        self._task, self._rows = task, rows
        self._batch = rows_at_once(task, tokenizer)
        self._examples = task.encode(rows, tokenizer)
        lengths = self._examples.lengths
        self._order = sorted(range(len(lengths)), key=lengths.__getitem__)

    @torch.inference_mode()
    def evaluate(self, model: SplitModel) -> Evaluation:
        """Loss and metric of ``model``, with greedy predictions.

        Raises ``NonFiniteLossError`` for a model that has diverged.
        """
        model.eval()
        loss, tokens = 0.0, 0
        predictions: dict[int, list[int]] = {}
        for start in range(0, len(self._order), self._batch):
            rows = self._order[start : start + self._batch]
            batch = self._examples.batch(rows).to(model.device)
            hidden = model.encode(batch.inputs, batch.mask)
            head = cast(Head, model.head)
            loss += float(head.loss(hidden, batch.mask, batch.targets))
            tokens += batch.num_targets
            generated = head.generate(hidden, batch.mask, self._task.max_length)
            predictions |= zip(rows, generated, strict=True)
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the evaluation's loss is {loss}; lower optimizer.lr")
        texts = self._examples.decode([predictions[row] for row in sorted(predictions)])
        return Evaluation(loss / tokens, self._task.score(texts, self._rows, loss / tokens))
