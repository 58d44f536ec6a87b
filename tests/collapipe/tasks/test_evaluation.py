"""In every task, the statistics of parts add up to the statistics of all rows."""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from sklearn.metrics import accuracy_score, f1_score
from trained import scored, trained

from collapipe.config import load_overrides
from collapipe.errors import ConfigError, DataError
from collapipe.models.split import SplitModel
from collapipe.runs.rows import build_tokenizer, load_rows
from collapipe.statistics import Statistics
from collapipe.tasks import evaluation
from collapipe.tasks.classification import Classification
from collapipe.tasks.evaluation import Evaluation, Evaluator, Predictor, mean_evaluation
from collapipe.tasks.ner import NamedEntities
from collapipe.tasks.task import Score, Task
from collapipe.tasks.text_task import LabelledTexts
from collapipe.tasks.translation import ParallelCorpus

LABELS = ["a", "b", "c", "d"]
TAGS = ["B-X", "B-Y", "I-X", "I-Y", "O"]
WORDS = ["hen", "owl", "fox", "saw"]
label = st.sampled_from(LABELS)
tags = st.lists(st.sampled_from(TAGS), min_size=4, max_size=4)
text = st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join)
cuts = st.lists(st.integers(0, 12), max_size=4)


def added(
    task: Task, predictions: Sequence[str], rows: Dataset, labels: Sequence[str], where: list[int]
) -> Statistics:
    """The sum of the parts' statistics, with rows cut at the places ``where``."""
    ends = sorted({0, len(rows), *(place for place in where if place < len(rows))})
    parts = [
        Statistics(
            stop - start,
            stop - start,
            (1.0,),
            task.count(predictions[start:stop], rows.select(range(start, stop)), labels),
        )
        for start, stop in pairwise(ends)
    ]
    assert all(task.possible(part, labels) for part in parts)
    return reduce(add, parts)


@given(st.lists(st.tuples(label, label), min_size=1, max_size=12), cuts)
def test_confusion_matrices_add_up(pairs: list[tuple[str, str]], where: list[int]) -> None:
    """The score equals scikit-learn's score of all rows; labels that do not occur are ignored."""
    truth, predicted = map(list, zip(*pairs, strict=True))
    rows = Dataset.from_dict({"text": truth, "label": truth})
    task = Classification(None, False, 300, 32)
    found = task.score(added(task, predicted, rows, LABELS, where))
    f1 = f1_score(truth, predicted, average="macro", zero_division=0)
    assert found.value == round(accuracy_score(truth, predicted), 6)
    assert found.extra_metrics == {"macro-F1": round(float(f1), 6)}


@given(st.lists(st.tuples(tags, tags), min_size=1, max_size=12), cuts)
def test_counts_of_entities_add_up(
    pairs: list[tuple[list[str], list[str]]], where: list[int]
) -> None:
    """The score equals the score of all sentences, which ``test_ner`` compares with seqeval."""
    truth, predicted = zip(*pairs, strict=True)
    rows = Dataset.from_dict({"tokens": [list("wxyz")] * len(truth), "tags": list(truth)})
    texts = [" ".join(each) for each in predicted]
    task = NamedEntities(None, False, 300, 32)
    assert task.score(added(task, texts, rows, TAGS, where)) == scored(task, texts, rows)


@given(st.lists(st.tuples(text, text), min_size=1, max_size=12), cuts)
def test_counts_of_n_grams_add_up(pairs: list[tuple[str, str]], where: list[int]) -> None:
    """The score equals sacrebleu's BLEU of the whole corpus."""
    targets, predictions = map(list, zip(*pairs, strict=True))
    rows = Dataset.from_dict({"source": targets, "target": targets})
    task = ParallelCorpus(300, 32, "tiny", None, "nobody/tiny", "de", "en")
    bleu = BLEU()
    expected = bleu.corpus_score(predictions, [targets]).score
    found = task.score(added(task, predictions, rows, (), where))
    assert (found.value, found.signature) == (round(expected, 6), str(bleu.get_signature()))


SMALL = ("task.vocabulary=300", "data.max_eval_samples=24")
ENCODER = (
    "model=huggingface",
    "data=synthetic",
    "model.family=bert",
    "model.config={num_hidden_layers: 2, hidden_size: 16, num_attention_heads: 2, "
    "intermediate_size: 16}",
)
CAUSAL = (
    "model=huggingface",
    "data=synthetic",
    "model.family=gpt2",
    "model.num_blocks=1",
    "model.config={n_layer: 2, n_embd: 16, n_head: 2}",
)
KINDS = {
    "dates": ("model.dim=16", "model.num_blocks=2", "task.train_rows=60"),
    "classification": ENCODER,
    "ner": ENCODER,
    "causal_lm": (*CAUSAL, "task.max_length=9"),
}


@pytest.mark.parametrize("task", KINDS)
def test_statistics_of_rows_that_are_evaluated_apart_add_up_bit_for_bit(task: str) -> None:
    """The division of the rows into parts does not matter.

    Rows that are evaluated together differ only by rounding, except texts joined to one stream.
    """
    settings = load_overrides([f"task={task}", *KINDS[task], *SMALL])
    rows, tokenizer = load_rows(settings, "validation"), build_tokenizer(settings)
    torch.manual_seed(0)
    model = SplitModel(settings.model, tokenizer.vocabulary)

    def apart(of: Dataset) -> Statistics:
        return Evaluator(settings.task, of, tokenizer, apart=True).statistics(model)

    whole, places = apart(rows), (range(5), range(5, 6), range(6, len(rows)))
    parts = [apart(rows.select(place)) for place in places]
    total = reduce(add, parts[::-1])
    assert (total.loss, total.tokens, total.rows) == (whole.loss, whole.tokens, whole.rows)
    assert total.counts.tolist() == whole.counts.tolist()
    turned = apart(concatenate_datasets([rows.select(place) for place in places[::-1]]))
    assert turned.losses == whole.losses
    together = Evaluator(settings.task, rows, tokenizer).statistics(model)
    if task != "causal_lm":
        assert together.loss == pytest.approx(whole.loss, rel=1e-5)
        assert together.tokens == whole.tokens


def test_texts_that_are_encoded_apart_are_separate_streams() -> None:
    """EOS encloses each text; no piece has tokens of two texts."""
    settings = load_overrides(["task=causal_lm", *KINDS["causal_lm"]])
    rows = Dataset.from_dict({"text": ["a hen reads a paper at home", "", "two owls"]})
    tokenizer = trained(settings.task, rows)
    examples, eos = settings.task.encode_apart(rows, tokenizer), tokenizer.vocabulary.eos
    batches = [examples.batch([row]) for row in range(len(examples.lengths))]
    inputs = [token for batch in batches for token in batch.inputs[0].tolist()]
    targets = [token for batch in batches for token in batch.targets[0].tolist()]
    texts = tokenizer.encode(rows["text"][:])
    assert inputs == [token for ids in texts for token in [eos, *ids]]
    assert targets == [token for ids in texts for token in [*ids, eos]]
    assert max(examples.lengths) <= 9


def test_a_batch_has_fewer_rows_in_a_wider_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control unit that trains in small batches must have memory for its evaluation, too."""
    settings = load_overrides(["task=classification", *KINDS["classification"], *SMALL])
    rows, tokenizer = load_rows(settings, "validation"), build_tokenizer(settings)
    model = SplitModel(settings.model, tokenizer.vocabulary)
    sizes = list[int]()
    model.embedding.register_forward_hook(lambda *call: sizes.append(len(call[2])))
    for most in (2, 5):
        row = settings.task.max_length * settings.model.dim
        monkeypatch.setattr(evaluation, "_MOST_ACTIVATIONS", most * row)
        Evaluator(settings.task, rows, tokenizer).statistics(model)
        assert max(sizes) == most


@pytest.mark.parametrize("predicts", [False, True])
def test_a_task_that_loses_a_text_is_refused(
    predicts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_overrides(["task=classification", *KINDS["classification"], *SMALL])
    rows, tokenizer = load_rows(settings, "validation"), build_tokenizer(settings)
    model = SplitModel(settings.model, tokenizer.vocabulary).eval()
    decode = LabelledTexts.decode
    monkeypatch.setattr(LabelledTexts, "decode", lambda self, ids: decode(self, ids)[1:])
    with pytest.raises(ConfigError, match=r"^task: LabelledTexts.decode returned "):
        if predicts:
            list(Predictor(model, settings.task, tokenizer).predict(["a", "b"]))
        else:
            Evaluator(settings.task, rows, tokenizer).statistics(model)


def test_rows_without_a_target_cannot_be_evaluated() -> None:
    """A tokeniser may make no token of a word."""
    settings = load_overrides(["task=ner", *ENCODER])
    rows = Dataset.from_dict({"tokens": [[""], ["", ""]], "tags": [["O"], ["B-X", "O"]]})
    tokenizer = trained(settings.task, rows)
    evaluator = Evaluator(settings.task, rows, tokenizer)
    with pytest.raises(DataError, match=r"^2 rows to evaluate on without a target token; "):
        evaluator.statistics(SplitModel(settings.model, tokenizer.vocabulary))


def test_the_evaluation_of_several_models_is_their_mean() -> None:
    evaluations = [
        Evaluation(loss, Score("accuracy", value, "exact", {"f1": f1}))
        for loss, value, f1 in ((1.0, 0.2, 0.1), (2.0, 0.6, 0.4), (6.0, 0.7, 0.4))
    ]
    mean = mean_evaluation(evaluations)
    assert mean.loss == pytest.approx(3.0)
    assert mean.score.value == pytest.approx(0.5)
    assert mean.score.extra_metrics == {"f1": pytest.approx(0.3)}
    assert mean.score.signature == "exact|mean of 3 units' models"
