"""Use a trained model: predictions for texts, and its evaluation on rows that no unit trains on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from collapipe.errors import (
    WAY_OUT_AFTER_AGGREGATION,
    ConfigError,
    DataError,
    NonFiniteLossError,
)
from collapipe.formatting import counted
from collapipe.models.split import Head, SplitModel, predictions
from collapipe.process import cancellation
from collapipe.statistics import Statistics, exact_sum
from collapipe.tasks.causal_lm import ContinuedText, correct_tokens
from collapipe.tasks.task import Examples, Score, Task
from collapipe.tensors import IGNORED, Batch, padded
from collapipe.text.tokenizer import Tokenizer
from collapipe.validation import check_fields, returned

APART = "rows apart"
"""Signature of an evaluation in which no row's result depends on other rows."""
_MOST_ROWS = 256  # of a batch: enough for fast matrix products
_MOST_LOGITS = 2**26  # of a batch: a causal model has one per token and class
_MOST_ACTIVATIONS = 2**24  # of a batch between two blocks; inside a block there are more


def rows_at_once(task: Task, tokenizer: Tokenizer, dim: int) -> int:
    """Return how many rows a batch may have, to bound the memory of a model of width ``dim``."""
    by_answers = _MOST_LOGITS // (task.max_length * tokenizer.vocabulary.num_classes)
    by_activations = _MOST_ACTIVATIONS // (task.max_length * dim)
    return max(1, min(_MOST_ROWS, by_answers, by_activations))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A label, a tag for each word, or generated text, and scores if requested.

    Scores are ``probability`` (a list for tags) and ``probabilities`` of all labels, or
    ``log_probability`` of generated text.
    """

    text: str
    scores: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts with a run's model; with ``scored`` predictions have scores."""

    model: SplitModel
    task: Task
    tokenizer: Tokenizer
    scored: bool = False

    def predict(self, texts: Sequence[str]) -> Iterator[Prediction]:
        """Yield predictions for ``texts`` in their order."""
        size = rows_at_once(self.task, self.tokenizer, self.model.dim)
        for start in range(0, len(texts), size):
            yield from self._batch(texts[start : start + size])

    @torch.inference_mode()
    def _batch(self, texts: Sequence[str]) -> list[Prediction]:
        examples = self.task.inputs(texts, self.tokenizer)
        batch = examples.batch(range(len(texts))).to(self.model.device)
        hidden = self.model.encode(batch.inputs, batch.mask)
        ids = predictions(self.model.head, hidden, batch.mask, self.task.max_length)
        answers = _decoded(examples, ids)
        scores = self._scores(examples, hidden, batch.mask, ids) if self.scored else [{}] * len(ids)
        return [Prediction(*each) for each in zip(answers, scores, strict=True)]

    def _scores(
        self, examples: Examples, hidden: Tensor, mask: Tensor, ids: Sequence[Sequence[int]]
    ) -> list[Mapping[str, Any]]:
        head = cast(Any, self.model.head)
        if hasattr(examples, "scores") and hasattr(head, "logits"):
            probabilities = head.logits(hidden, mask).softmax(-1)
            return [examples.scores(row, probabilities[row]) for row in range(len(ids))]
        end, longest = self.tokenizer.vocabulary.eos, self.task.max_length
        targets = [[*row, end][:longest] for row in ids]
        if "causal" in self.task.heads:  # the token after the last one is the prediction
            targets = [[*[IGNORED] * (len(row) - 1), row[-1]] for row in ids]
        found = list[Mapping[str, Any]]()
        for row, own in enumerate(targets):
            one, expected = slice(row, row + 1), padded([own], IGNORED).to(hidden.device)
            found.append({"log_probability": -float(head.loss(hidden[one], mask[one], expected))})
        return found


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss per target token, and the task's metric."""

    loss: float
    score: Score


def evaluation_of(task: Task, statistics: Statistics, how: str = "") -> Evaluation:
    """Return loss and metric from ``statistics``; the signature includes ``how`` they were made.

    Raises ``NonFiniteLossError`` if the metric overflows, and ``ConfigError`` if it is no score.
    """
    method = f"{type(task).__qualname__}.score"
    score = returned(task.score(statistics), Score, f"task: {method}")
    check_fields(f"task: {method}", score)
    signature = f"{score.signature}|{how}" if how else score.signature
    return Evaluation(statistics.loss, replace(score, signature=signature))


def by_length(examples: Examples, at_once: int, equal: bool = False) -> Iterator[list[int]]:
    """Yield the rows of batches of similar length, or of ``equal`` length, shortest first."""
    order = sorted(range(len(examples.lengths)), key=examples.lengths.__getitem__)
    for _, group in groupby(order, examples.lengths.__getitem__ if equal else lambda row: 0):
        rows = list(group)
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once]


def mean_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the mean of several models' losses and metrics, with a signature that says so."""
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
    """Evaluates on fixed rows, in batches of similar length to reduce padding.

    With ``apart`` a row's result does not depend on other rows: its loss is computed alone, and
    predictions are made in batches of rows of one length without padding. On equal machines the
    losses of subsets then add up to the loss of all rows, bit for bit. The counts add up too,
    unless two predictions are so close that the rounding of a larger matrix product decides.
    Without ``apart`` the last bits of a loss depend on the batches, and ``causal_lm`` reads all
    texts as one stream.
    """

    def __init__(
        self, task: Task, rows: Dataset, tokenizer: Tokenizer, apart: bool = False
    ) -> None:
        self._task, self._rows, self._tokenizer, self._apart = task, rows, tokenizer, apart
        encode = task.encode_apart if apart else task.encode
        self._examples = encode(rows, tokenizer)

    def evaluate(self, model: SplitModel) -> Evaluation:
        """Return loss and metric of ``model``. Raises ``NonFiniteLossError`` if it diverged."""
        how = APART if self._apart else ""
        return evaluation_of(self._task, self.statistics(model), how)

    @torch.inference_mode()
    def statistics(self, model: SplitModel) -> Statistics:
        """Return the statistics of the model's greedy predictions. Raises as ``evaluate``, and
        ``DataError`` if the rows have no target, such as words of which the tokeniser makes no
        token."""
        model.eval()
        losses, tokens, correct = list[float](), 0, 0
        predicted: dict[int, list[int]] = {}
        # Predictions of causal models take as long as their loss: nothing is gained by batches.
        one = self._apart and isinstance(self._task, ContinuedText)
        at_once = 1 if one else rows_at_once(self._task, self._tokenizer, model.dim)
        for rows in by_length(self._examples, at_once, self._apart):
            cancellation.check()
            batch = self._examples.batch(rows).to(model.device)
            hidden = model.encode(batch.inputs, batch.mask)
            if self._apart and len(rows) > 1:
                losses += [self._loss_alone(model, row) for row in rows]
            else:
                losses.append(_loss(model, hidden, batch))
            tokens += batch.num_targets
            generated = predictions(model.head, hidden, batch.mask, self._task.max_length)
            predicted |= zip(rows, generated, strict=True)
            if isinstance(self._task, ContinuedText):
                correct += correct_tokens(generated, batch.targets)
        if not tokens:
            raise DataError(
                f"{counted(len(self._rows), 'row')} to evaluate on without a target token; take "
                "other rows, or another data.tokenizer",
                "its rows to evaluate on have no target token",
            )
        if not all(map(math.isfinite, losses)):
            raise NonFiniteLossError(
                f"the evaluation's loss is {sum(losses)}; {WAY_OUT_AFTER_AGGREGATION}"
            )
        texts = _decoded(self._examples, [predicted[row] for row in sorted(predicted)])
        counts = returned(
            self._task.count(texts, self._rows, self._tokenizer.labels),
            np.ndarray,
            f"task: {type(self._task).__qualname__}.count",
        )
        return Statistics(len(self._rows), tokens, exact_sum(losses), counts + correct)

    def _loss_alone(self, model: SplitModel, row: int) -> float:
        batch = self._examples.batch([row]).to(model.device)
        return _loss(model, model.encode(batch.inputs, batch.mask), batch)


def _decoded(examples: Examples, ids: Sequence[Sequence[int]]) -> list[str]:
    texts = examples.decode(ids)
    if len(texts) != len(ids):
        raise ConfigError(
            f"task: {type(examples).__qualname__}.decode returned {counted(len(texts), 'text')} "
            f"for {counted(len(ids), 'prediction')}"
        )
    return texts


def _loss(model: SplitModel, hidden: Tensor, batch: Batch) -> float:
    return float(cast(Head, model.head).loss(hidden, batch.mask, batch.targets))
