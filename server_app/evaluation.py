"""The global model on rows that no unit trains on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from datasets import Dataset

from collapipe.batch import Batch
from collapipe.errors import NonFiniteLossError
from collapipe.models.split import Head, SplitModel
from collapipe.tasks.task import Score, Task
from collapipe.tasks.tokenizer import Tokenizer

_BATCH = 256  # rows at once: long enough for fast matrices, short enough for any memory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss per target token, and the task's metric."""

    loss: float
    score: Score


class Evaluator:
    """Evaluates on fixed rows, sorted by length so that a batch is padded little."""

    def __init__(self, task: Task, rows: Dataset, tokenizer: Tokenizer) -> None:
        self._task, self._rows, self._tokenizer = task, rows, tokenizer
        self._examples = task.encode(rows, tokenizer)
        lengths = [int(self._examples.batch([row]).mask.sum()) for row in range(len(rows))]
        self._order = sorted(range(len(rows)), key=lengths.__getitem__)

    @torch.inference_mode()
    def evaluate(self, model: SplitModel) -> Evaluation:
        """Loss and metric of ``model``, with greedy predictions.

        Raises ``NonFiniteLossError`` for a model that has diverged.
        """
        model.eval()
        loss, tokens = 0.0, 0
        predictions: list[list[int]] = [[] for _ in self._order]
        for rows, batch in self._batches():
            hidden = model.encode(batch.inputs, batch.mask)
            head = cast(Head, model.head)
            loss += float(head.loss(hidden, batch.mask, batch.targets))
            tokens += batch.num_targets
            generated = head.generate(hidden, batch.mask, self._task.max_length)
            for row, ids in zip(rows, generated, strict=True):
                predictions[row] = ids
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the evaluation's loss is {loss}; lower optimizer.lr")
        texts = self._task.decode(predictions, self._tokenizer)
        return Evaluation(loss / tokens, self._task.score(texts, self._rows))

    def _batches(self) -> Iterator[tuple[list[int], Batch]]:
        for start in range(0, len(self._order), _BATCH):
            rows = self._order[start : start + _BATCH]
            yield rows, self._examples.batch(rows)
