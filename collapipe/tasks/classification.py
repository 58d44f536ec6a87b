"""Classification: texts with one label each, accuracy and macro-F1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sklearn
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from collapipe.batch import IGNORED, Batch
from collapipe.data.folders import parse_labelled
from collapipe.tasks.synthetic import topics
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import OwnRows, TextTask
from collapipe.text.labels import count_labels, find_label, label_ids
from collapipe.text.padding import mask_of, padded, truncate
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Token ids of texts, without marks, and each text's label: one id, or none if unknown."""

    texts: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    tokenizer: Tokenizer

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text with both marks."""
        return [len(ids) + 2 for ids in self.texts]

    def batch(self, rows: Sequence[int]) -> Batch:
        """A text stands between BOS and EOS; targets are [b, 1]."""
        marks = self.tokenizer.vocabulary
        texts = [[marks.bos, *self.texts[row], marks.eos] for row in rows]
        targets = padded([self.labels[row] for row in rows], IGNORED)
        return Batch(padded(texts, marks.pad), mask_of(texts), targets)

    def decode(self, predictions: Sequence[Sequence[int]]) -> list[str]:
        """Each text's label by name."""
        return [self.tokenizer.labels[label] for (label,) in predictions]

    def scores(self, row: int, probabilities: Tensor) -> dict[str, Any]:
        """Of all labels [labels], by name, and of the likeliest."""
        each = dict(zip(self.tokenizer.labels, probabilities.tolist(), strict=True))
        return {"probability": max(each.values()), "probabilities": each}


@dataclass(frozen=True, slots=True)
class Classification(TextTask):
    """Rows have the columns ``text`` and ``label``, a name.

    A line of the folder's .tsv files is ``text<TAB>label id``; line i of ``labels.txt``, counted
    from 0, names label i.
    """

    name = "classification"
    columns = ("text", "label")
    heads = ("pooled",)
    own_rows = OwnRows("tsv", parse_labelled, topics)

    def label_counts(self, rows: Dataset) -> dict[str, int]:
        """Rows of each label, see ``count_labels``."""
        return count_labels(rows["label"])

    def train_tokenizer(self, rows: Dataset) -> Tokenizer:
        """Byte-level BPE of the texts."""
        return Tokenizer.train(rows["text"], self.vocabulary)

    def encode(self, rows: Dataset, tokenizer: Tokenizer) -> LabelledTexts:
        """Texts and labels as ids. Raises ``DataError`` for a label without one."""
        ids = label_ids(tokenizer.labels)
        labels = [[find_label(name, ids, row)] for row, name in enumerate(rows["label"], 1)]
        return LabelledTexts(self._ids(rows["text"], tokenizer), labels, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> LabelledTexts:
        """Texts whose labels are unknown."""
        return LabelledTexts(self._ids(texts, tokenizer), [[] for _ in texts], tokenizer)

    def score(self, predictions: Sequence[str], rows: Dataset, loss: float) -> Score:
        """Accuracy, and beside it the mean of the labels' F1 as scikit-learn defines it."""
        truth, predicted = list(rows["label"]), list(predictions)
        accuracy = float(accuracy_score(truth, predicted))
        macro_f1 = float(f1_score(truth, predicted, average="macro", zero_division=0))
        signature = f"sklearn {sklearn.__version__}:rows={len(truth)}"
        return Score("accuracy", round(accuracy, 6), signature, {"macro-F1": round(macro_f1, 6)})

    def _ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[Sequence[int]]:
        return truncate(tokenizer.encode(texts), self.max_length - 2, self.max_length, "texts")
