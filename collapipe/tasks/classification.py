"""Classification: texts with one label each; metrics: accuracy and macro-F1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from collapipe.data.folders import parse_labelled
from collapipe.statistics import Statistics
from collapipe.tasks.synthetic import topics
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import LabelledTask, LabelledTexts, count_labels, encode_labels
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Classification(LabelledTask):
    """Classification of texts; rows have the columns ``text`` and ``label``, a name.

    A line of the folder's files is ``text<TAB>label id``; line i of ``labels.txt``, counted from 0,
    names label i.
    """

    name = "classification"
    columns = ("text", "label")
    heads = ("pooled",)
    suffix, parse, made_up = "tsv", parse_labelled, topics

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        return count_labels(rows["label"])

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> LabelledTexts:
        """Return texts and labels as ids. Raises ``DataError`` for an unknown label."""
        labels = encode_labels(([name] for name in rows["label"]), tokenizer.labels)
        texts = self.truncated(tokenizer.encode(rows["text"]), 2)
        return LabelledTexts(texts, labels, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> LabelledTexts:
        ids = self.truncated(tokenizer.encode(texts), 2)
        return LabelledTexts(ids, [[] for _ in texts], tokenizer)

    def count(
        self, predictions: Sequence[str], rows: Dataset, labels: Sequence[str]
    ) -> NDArray[np.int64]:
        """Return the confusion matrix, int64 [true label, predicted label]."""
        number = {label: place for place, label in enumerate(labels)}
        matrix = np.zeros((len(labels),) * 2, np.int64)
        for label, predicted in zip(rows["label"], predictions, strict=True):
            matrix[number[label], number[predicted]] += 1
        return matrix

    def possible(self, statistics: Statistics, labels: Sequence[str]) -> bool:
        """Whether the matrix has one entry per row: each row has one label and one prediction."""
        counts = statistics.counts
        return counts.shape == (len(labels),) * 2 and counts.sum() == statistics.rows

    def score(self, statistics: Statistics) -> Score:
        """Return accuracy and macro F1 (scikit-learn) over the labels that occur in rows or
        predictions."""
        import sklearn  # imports SciPy; a unit only counts and does not need it
        from sklearn.metrics import accuracy_score, f1_score

        truth, predicted = statistics.counts.nonzero()
        times = statistics.counts[truth, predicted]
        accuracy = float(accuracy_score(truth, predicted, sample_weight=times))
        macro_f1 = float(
            f1_score(truth, predicted, average="macro", zero_division=0, sample_weight=times)
        )
        signature = f"sklearn {sklearn.__version__}:rows={statistics.rows}"
        return Score("accuracy", round(accuracy, 6), signature, {"macro-F1": round(macro_f1, 6)})
