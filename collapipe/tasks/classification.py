"""Classification: texts with one label each, accuracy and macro-F1."""

from collections.abc import Sequence
from dataclasses import dataclass

import sklearn
from datasets import Dataset
from sklearn.metrics import accuracy_score, f1_score

from collapipe.data.folders import parse_labelled
from collapipe.tasks.synthetic import topics
from collapipe.tasks.task import Score
from collapipe.tasks.text_task import LabelledTask, LabelledTexts, count_labels, encode_labels
from collapipe.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Classification(LabelledTask):
    """Rows have the columns ``text`` and ``label``, a name.

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
        """Texts and labels as ids. Raises ``DataError`` for a label without one."""
        labels = encode_labels(([name] for name in rows["label"]), tokenizer.labels)
        texts = self.truncated(tokenizer.encode(rows["text"]), 2)
        return LabelledTexts(texts, labels, tokenizer)

    def inputs(self, texts: Sequence[str], tokenizer: Tokenizer) -> LabelledTexts:
        ids = self.truncated(tokenizer.encode(texts), 2)
        return LabelledTexts(ids, [[] for _ in texts], tokenizer)

    def score(self, predictions: Sequence[str], rows: Dataset, loss: float) -> Score:
        """Accuracy, and beside it the mean of the labels' F1 as scikit-learn defines it."""
        truth, predicted = list(rows["label"]), list(predictions)
        accuracy = float(accuracy_score(truth, predicted))
        macro_f1 = float(f1_score(truth, predicted, average="macro", zero_division=0))
        signature = f"sklearn {sklearn.__version__}:rows={len(truth)}"
        return Score("accuracy", round(accuracy, 6), signature, {"macro-F1": round(macro_f1, 6)})
