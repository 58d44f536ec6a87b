"""Membership inference: does a row's loss reveal that the model was trained on it?"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from collapipe.audit.material import AT_ONCE, drawn
from collapipe.audit.result import Membership, Share
from collapipe.config import Settings
from collapipe.models.split import Head, SplitModel
from collapipe.runs.rows import load_rows, load_shards
from collapipe.seeds import derive
from collapipe.tasks.evaluation import by_length
from collapipe.tasks.task import Task
from collapipe.text.tokenizer import Tokenizer

_RESAMPLES, _MOST_MEMBERS = 1000, 500
_Losses = NDArray[np.float64]


def membership_of(
    settings: Settings, model: SplitModel, tokenizer: Tokenizer, unit: int | None = None
) -> Membership | None:
    """Compare a run's training rows, of all units or of one, with its validation rows.

    Returns None if training rows are only on their owners' machines.
    """
    if settings.runtime.name == "deployment" or settings.has_owners_rows:
        return None
    shards = load_shards(settings)
    trained = concatenate_datasets(shards) if unit is None else shards[unit]
    members, others = (
        losses_of(model, settings.task, drawn(rows, _MOST_MEMBERS, settings.seed), tokenizer)
        for rows in (trained, load_rows(settings, "validation"))
    )
    return membership(members, others, derive(settings.seed, "audit", "bootstrap"))


@torch.inference_mode()
def losses_of(model: SplitModel, task: Task, rows: Dataset, tokenizer: Tokenizer) -> _Losses:
    """Return the loss per target token of each row, without dropout."""
    model.eval()
    examples, head = task.encode_apart(rows, tokenizer), cast(Head, model.head)
    losses = np.zeros(len(examples.lengths))
    for chosen in by_length(examples, AT_ONCE):
        batch = examples.batch(chosen)
        hidden = model.encode(batch.inputs, batch.mask)
        for n, row in enumerate(chosen):
            one = slice(n, n + 1)
            loss = head.loss(hidden[one], batch.mask[one], batch.targets[one])
            losses[row] = float(loss) / max(1, int((batch.targets[one] >= 0).sum()))
    return losses


def membership(members: _Losses, others: _Losses, seed: int) -> Membership:
    """Return how well losses distinguish ``members`` (training rows) from ``others``.

    Intervals are percentiles of a bootstrap over rows of both kinds.
    """
    draw = np.random.default_rng(seed)
    drawn = [
        rows[draw.integers(len(rows), size=(_RESAMPLES, len(rows)))] for rows in (members, others)
    ]

    def share(statistic: Callable[[_Losses, _Losses], _Losses]) -> Share:
        low, high = np.quantile(statistic(*drawn), (0.025, 0.975))
        return Share(float(statistic(members, others)), float(low), float(high))

    return Membership(min(len(members), len(others)), share(advantage), share(auc))


def advantage(members: _Losses, others: _Losses) -> _Losses:
    """Return TPR − FPR if rows with a loss up to the members' mean are classified as members."""
    threshold = members.mean(-1, keepdims=True)
    return np.asarray((members <= threshold).mean(-1) - (others <= threshold).mean(-1))


def auc(members: _Losses, others: _Losses) -> _Losses:
    """Return how often a member's loss is below another row's; ties count half (Mann–Whitney)."""
    found = mannwhitneyu(others, members, axis=-1, method="asymptotic")
    return np.asarray(found.statistic / (members.shape[-1] * others.shape[-1]))
