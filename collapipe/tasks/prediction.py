"""Predictions of a trained model for texts, in batches, with probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from collapipe.errors import ConfigError
from collapipe.models.split import Head, SplitModel
from collapipe.tasks.task import Examples, Task
from collapipe.tensors import IGNORED, Batch, mask_of, padded
from collapipe.text.tokenizer import Tokenizer

_MOST_ROWS = 256  # of a batch: enough for fast matrix products
_MOST_LOGITS = 2**26  # of a batch: a causal model has one per token and class


def rows_at_once(task: Task, tokenizer: Tokenizer) -> int:
    """Return how many rows a batch may have, to bound its memory."""
    answer = task.max_length * tokenizer.vocabulary.num_classes
    return max(1, min(_MOST_ROWS, _MOST_LOGITS // answer))


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
    """Predicts with a run's model; with ``scored`` predictions have scores.

    A causal model continues a text by at most ``max_new_tokens`` tokens.
    """

    model: SplitModel
    task: Task
    tokenizer: Tokenizer
    max_new_tokens: int | None = None
    scored: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if self.max_new_tokens is not None and not self._causal:
            raise ConfigError(
                f"--max-new-tokens: a model of task={self.task.name} continues no text; leave it "
                "out"
            )

    def predict(self, texts: Sequence[str]) -> Iterator[Prediction]:
        """Yield predictions for ``texts`` in their order."""
        size = rows_at_once(self.task, self.tokenizer)
        for start in range(0, len(texts), size):
            yield from self._batch(texts[start : start + size])

    @property
    def _causal(self) -> bool:
        return "causal" in self.task.heads

    @torch.inference_mode()
    def _batch(self, texts: Sequence[str]) -> list[Prediction]:
        examples = self.task.inputs(texts, self.tokenizer)
        batch = examples.batch(range(len(texts))).to(self.model.device)
        if self._causal and (self.scored or self.max_new_tokens is not None):
            return self._continued(batch)
        head = cast(Head, self.model.head)
        hidden = self.model.encode(batch.inputs, batch.mask)
        ids = head.generate(hidden, batch.mask, self.task.max_length)
        answers = examples.decode(ids)
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
        return [
            {"log_probability": _log_probability(head, hidden, mask, n, row)}
            for n, row in enumerate(targets)
        ]

    def _continued(self, batch: Batch) -> list[Prediction]:
        """Continue texts greedily with the most likely token, until EOS."""
        head, longest = cast(Head, self.model.head), self.task.max_length
        end, fill = self.tokenizer.vocabulary.eos, self.tokenizer.vocabulary.pad
        given = [row[real].tolist() for row, real in zip(batch.inputs, batch.mask, strict=True)]
        written: list[list[int]] = [[] for _ in given]
        log_probability = [0.0] * len(given)
        for _ in range(self.max_new_tokens or 1):
            going = [n for n, ids in enumerate(written) if ids[-1:] != [end]]
            if not going:
                break
            seen = [[*given[n], *written[n]][-longest:] for n in going]
            mask = mask_of(seen).to(self.model.device)
            hidden = self.model.encode(padded(seen, fill).to(mask.device), mask)
            found = head.generate(hidden, mask, longest)
            for row, n in enumerate(going):
                written[n].append(found[row][-1])
                if self.scored:
                    targets = [*[IGNORED] * (len(seen[row]) - 1), found[row][-1]]
                    log_probability[n] += _log_probability(head, hidden, mask, row, targets)
        texts = self.tokenizer.decode(written)
        return [
            Prediction(text, {"log_probability": each} if self.scored else {})
            for text, each in zip(texts, log_probability, strict=True)
        ]


def _log_probability(
    head: Head, hidden: Tensor, mask: Tensor, row: int, targets: Sequence[int]
) -> float:
    """Return the natural logarithm of the probability of one row's targets."""
    one = slice(row, row + 1)
    expected = padded([targets], IGNORED).to(hidden.device)
    return -float(head.loss(hidden[one], mask[one], expected))
