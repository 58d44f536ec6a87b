"""A tokeniser as a run makes it, of rows at hand."""

from collections.abc import Sequence

from datasets import Dataset

from collapipe.tasks.task import Task
from collapipe.tasks.text_task import in_order
from collapipe.text.tokenizer import Tokenizer
from collapipe.text.words import count_words


def trained(task: Task, rows: Dataset, labels: Sequence[str] | None = None) -> Tokenizer:
    """With the names of the rows' labels, or these."""
    words = count_words(task.texts(rows))
    labels = in_order(task.label_counts(rows)) if labels is None else labels
    return Tokenizer.train_from_counts(words, task.vocabulary).with_labels(labels)


def of_texts(texts: list[str], vocabulary: int) -> Tokenizer:
    return Tokenizer.train_from_counts(count_words([texts]), vocabulary)
