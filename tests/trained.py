"""Tokenisers and scores of given rows, computed in the same way as in a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from datasets import Dataset

from collapipe.statistics import Statistics
from collapipe.tasks.task import Score, Task
from collapipe.tasks.text_task import in_order
from collapipe.text.tokenizer import Tokenizer, count_words


def trained(task: Task, rows: Dataset, labels: Sequence[str] | None = None) -> Tokenizer:
    """A tokeniser of these rows, with ``labels`` or the rows' labels."""
    words = count_words(task.texts(rows))
    labels = in_order(task.label_counts(rows)) if labels is None else labels
    return replace(Tokenizer.train_from_counts(words, task.vocabulary), labels=labels)


def scored(task: Task, predictions: Sequence[str], rows: Dataset, loss: float = 1.0) -> Score:
    """The metric of predictions; the run's labels are those in the rows or in the predictions."""
    spoken = {} if not task.label_counts(rows) else Counter(" ".join(predictions).split())
    labels = in_order({*task.label_counts(rows), *spoken})
    counts = task.count(predictions, rows, labels)
    statistics = Statistics(len(rows), 1, (loss,), counts)
    assert task.possible(statistics, labels)
    return task.score(statistics)


def of_texts(texts: list[str], vocabulary: int) -> Tokenizer:
    return Tokenizer.train_from_counts(count_words([texts]), vocabulary)
