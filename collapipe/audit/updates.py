"""Simulate the updates of a run's units, and find the weights in them that attacks use."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from collapipe.config import Settings
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import Optimizer
from collapipe.models.split import SplitModel, masks_for
from collapipe.tensors import Batch, Tensors
from collapipe.wire.compression.codec import decode, encode


class Attacked(NamedTuple):
    """Names of the attacked weights: the tokens' embeddings [v, d], and the labels' bias [c].

    None if a weight does not train or is not sent.
    """

    embedding: str | None
    bias: str | None

    @classmethod
    def of(cls, settings: Settings, model: SplitModel, labels: int) -> "Attacked":
        """Return the attacked settings of a run's units, for a task with ``labels`` labels."""
        sends_head = settings.model.head == "pooled" and settings.units_have_heads
        biases = [
            f"head.{name}"
            for name, weight in model.head.named_parameters()
            if sends_head and weight.requires_grad and weight.shape == (labels,)
        ]
        # a head's last bias is the output's
        return cls(_token_table(model), biases[-1] if biases else None)


def _token_table(model: SplitModel) -> str | None:
    """Return the name of the weight that looks up token ids; None if it does not train. A table of
    positions may be the larger one."""
    embedding, ids, found = model.embedding.eval(), torch.tensor([[2, 0, 1]]), set[nn.Module]()

    def look(module: nn.Module, args: tuple[object, ...]) -> None:  # Marian's positions get a shape
        if any(isinstance(each, Tensor) and torch.equal(each, ids) for each in args):
            found.add(module)

    tables = [each for each in embedding.modules() if isinstance(each, nn.Embedding)]
    hooks = [each.register_forward_pre_hook(look) for each in tables]
    with torch.no_grad():
        embedding(ids, *masks_for(embedding, torch.ones_like(ids, dtype=torch.bool)))
    for hook in hooks:
        hook.remove()
    names = (
        f"embedding.{name}.weight" for name, each in embedding.named_modules() if each in found
    )
    trains = {name for name, weight in model.named_parameters() if weight.requires_grad}
    return next((name for name in names if name in trains), None)


def arrived(change: Tensor, precision: str, deviation: float, generator: torch.Generator) -> Tensor:
    """Return a weight's change with noise of this standard deviation, rounded as uploads are."""
    if deviation:
        change = change + deviation * torch.randn(change.shape, generator=generator)
    return decode(encode(change, precision), change.shape, precision, change.dtype)


def update_of(
    start: SplitModel, settings: Settings, names: Sequence[str], batches: Sequence[Batch]
) -> tuple[Tensors, float]:
    """Return the changes of the weights ``names`` in the update of a unit that starts at ``start``
    with an empty optimiser state, and the bound of which the noise is a multiple.

    It takes one step per batch with rate ``optimizer.lr``. The update is clipped as in the run;
    with ``privacy.clip_quantile`` to the initial clip norm. The bound is the run's clip norm or,
    without clipping, the norm of the whole update.
    """
    model, how = copy.deepcopy(start).train(), settings.optimizer
    optimizer = Optimizer(how, model)
    for step, batch in enumerate(batches):
        loss = model.loss(batch, DropoutKey(settings.seed, 0, step)) / batch.num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        if how.clip_norm is not None:
            clip_grad_norm_(model.parameters(), how.clip_norm)
        optimizer.step(how.lr)
    before = dict(start.named_parameters())
    changes = {
        name: (weight - before[name]).detach()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    norm, most = float(nn.utils.get_total_norm(changes.values())), settings.privacy.clip_norm
    factor = 1.0 if most is None else most / max(most, norm)
    changed = {name: factor * changes[name] for name in names}
    return changed, norm if most is None else most
