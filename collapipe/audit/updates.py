"""A unit's update, its change of weights in a round: the attacked weights, and how they arrive."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from collapipe.batch import Batch
from collapipe.config import Settings
from collapipe.models.dropout import DropoutKey
from collapipe.models.optimizer import Optimizer
from collapipe.models.split import SplitModel
from collapipe.wire.compression import decode, encode


@dataclass(frozen=True, slots=True)
class Attacked:
    """Names of the attacked weights: the tokens' embeddings [v, d], and the labels' bias [c].

    None if a weight does not train or is not sent.
    """

    embedding: str | None
    bias: str | None

    def __bool__(self) -> bool:
        return self != Attacked(None, None)

    @classmethod
    def of(cls, settings: Settings, model: SplitModel, labels: int) -> "Attacked":
        """Return the attacked settings of a run's units, for a task with ``labels`` labels."""
        if not settings.framework.aggregate:
            return cls(None, None)
        tables = [
            f"{name}.weight"
            for name, module in model.named_modules()
            if name.startswith("embedding.")
            and isinstance(module, nn.Embedding)
            and module.weight.requires_grad
        ]
        sends_head = settings.model.head == "pooled" and settings.units_have_heads
        biases = [
            f"head.{name}"
            for name, weight in model.head.named_parameters()
            if sends_head and weight.requires_grad and weight.shape == (labels,)
        ]
        # An embedding's largest weight is the token table; a head's last bias is the output's.
        size = {name: model.get_parameter(name).shape[0] for name in tables}
        return cls(max(size, key=size.__getitem__, default=None), biases[-1] if biases else None)


@dataclass(frozen=True, slots=True)
class Update:
    """Changes of the attacked weights, and ``bound``, of which the noise is a multiple.

    It is the run's clip norm or, without clipping, the norm of the whole update.
    """

    embedding: Tensor | None
    bias: Tensor | None
    bound: float

    def arrived(self, precision: str, noise: float, generator: torch.Generator) -> "Update":
        """Return the changes with noise of deviation ``noise``·bound, rounded as uploads are."""

        def arrives(change: Tensor | None) -> Tensor | None:
            if change is None:
                return None
            if noise:
                drawn = torch.randn(change.shape, generator=generator)
                change = change + noise * self.bound * drawn
            return decode(encode(change, precision), change.shape, precision, change.dtype)

        return Update(arrives(self.embedding), arrives(self.bias), self.bound)


def update_of(
    start: SplitModel, settings: Settings, attacked: Attacked, batches: Sequence[Batch]
) -> Update:
    """Return the update of a unit that starts at ``start`` with an empty optimiser state.

    It takes one step per batch with rate ``optimizer.lr``. The update is clipped as in the run;
    with ``privacy.clip_quantile`` to the initial clip norm.
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
    embedding, bias = (
        None if name is None else factor * changes[name]
        for name in (attacked.embedding, attacked.bias)
    )
    return Update(embedding, bias, norm if most is None else most)
