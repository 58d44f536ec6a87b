"""Synthetic rows depend only on the seed, are unique and are learned in seconds."""

from collections.abc import Callable

import pytest
import torch
from trained import trained

from collapipe.data.folders import Splits
from collapipe.data.shards import batch_rows
from collapipe.models.huggingface.spec import HuggingFaceSpec
from collapipe.models.split import SplitModel
from collapipe.tasks import synthetic
from collapipe.tasks.causal_lm import CausalLM
from collapipe.tasks.classification import Classification
from collapipe.tasks.evaluation import Evaluator
from collapipe.tasks.ner import NamedEntities
from collapipe.tasks.task import Task

BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
TASKS = [Classification, NamedEntities, CausalLM]
SETS = [synthetic.topics, synthetic.entities, synthetic.sentences]


@pytest.mark.parametrize("draw", SETS)
def test_rows_depend_on_the_seed_alone(draw: Callable[[int], Splits]) -> None:
    first, again, other = (draw(seed).train.to_dict() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("draw", SETS)
def test_no_row_occurs_twice(draw: Callable[[int], Splits]) -> None:
    """Rows are unique within and across splits; each split has its size."""
    splits = draw(3)
    rows = [list(map(str, part)) for part in (splits.train, splits.validation, splits.test)]
    assert [len(part) for part in rows] == [1200, 150, 150]
    assert len({row for part in rows for row in part}) == 1500


@pytest.mark.parametrize(("kind", "draw"), list(zip(TASKS, SETS, strict=True)))
def test_a_task_draws_its_rows_with_the_runs_seed(
    kind: type[Classification], draw: Callable[[int], Splits]
) -> None:
    splits = kind(None, True, 300, 32).splits(5)
    assert [part.to_dict() for part in (splits.train, splits.validation, splits.test)] == [
        part.to_dict() for part in (draw(5).train, draw(5).validation, draw(5).test)
    ]


def test_every_label_occurs_in_every_split() -> None:
    """Otherwise a score would depend on rows that no model can predict correctly."""
    for task in (Classification(None, True, 300, 32), NamedEntities(None, True, 300, 32)):
        splits = task.splits(5)
        names = [
            list(task.label_counts(rows)) for rows in (splits.train, splits.validation, splits.test)
        ]
        assert names[0] == names[1] == names[2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "spec", "untrained", "learned"),
    [
        (
            Classification(None, True, 1000, 48),
            HuggingFaceSpec(None, "bert", None, "pooled", BERT),
            (0.0, 0.4),
            (0.7, 1.0),
        ),
        (
            NamedEntities(None, True, 1000, 48),
            HuggingFaceSpec(None, "bert", None, "tokens", BERT),
            (0.0, 0.2),
            (0.85, 1.0),
        ),
        (
            CausalLM(None, True, 400, 32),
            HuggingFaceSpec(None, "gpt2", 1, None, GPT2),
            (250, 450),
            (3, 7),
        ),
    ],
    ids=["classification", "ner", "causal_lm"],
)
def test_a_small_model_learns_each_task(
    task: Task, spec: HuggingFaceSpec, untrained: tuple[float, float], learned: tuple[float, float]
) -> None:
    """In 160 steps, the score rises from chance to nearly the best possible score."""
    splits = task.splits(0)
    tokenizer = trained(task, splits.train)
    model, examples = SplitModel(spec, tokenizer.vocabulary), task.encode(splits.train, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    evaluator = Evaluator(task, splits.test, tokenizer)
    before = evaluator.evaluate(model).score  # switches the model's dropout off
    for step in range(160):
        batch = examples.batch(batch_rows(examples.lengths, 16, step, seed=0).tolist())
        loss = model.head.loss(model.encode(batch.inputs, batch.mask), batch.mask, batch.targets)
        optimizer.zero_grad()
        (loss / batch.num_targets).backward()
        optimizer.step()
    after = evaluator.evaluate(model).score
    for score, (least, most) in ((before, untrained), (after, learned)):
        assert least <= score.value <= most
