"""The baseline ``vanilla_fl``: the unit trains the whole model by itself, without a pipeline.

Shares no code with the pipeline: one model, one optimiser, torch's own clipping. So it is also the
oracle that the pipeline is held against.
"""

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from collapipe.batch import Batch
from collapipe.errors import NonFiniteLossError
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import build_optimizer, load_optimizer_state, optimizer_state, set_rate
from collapipe.models.split import ModelSpec, SplitModel, build_empty
from collapipe.sections import OptimizerSettings
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Vocabulary
from collapipe.timing import PhaseTimer


class UnsplitTrainer:
    """A model and its optimiser, with the same steps as a ``Pipeline``."""

    def __init__(
        self,
        spec: ModelSpec,
        vocabulary: Vocabulary,
        weights: Tensors,
        settings: OptimizerSettings,
        state: Mapping[str, Tensor],
    ) -> None:
        self._model = build_empty(lambda: SplitModel(spec, vocabulary), weights).train()
        self._optimizer = build_optimizer(settings, self._model.parameters())
        load_optimizer_state(self._model, self._optimizer, state)
        self.timer = PhaseTimer()

    def run(self, batch: Batch, key: DropoutKey) -> float:
        """Forward and backward; the loss."""
        assert isinstance(self._model, SplitModel)
        with self.timer.phase("forward"):
            loss = self._model.loss(batch, key) / batch.num_targets
        with self.timer.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, rate: float, clip_norm: float | None) -> float:
        """Clip by the global norm and step; the norm's square, before it was clipped."""
        with self.timer.phase("norms"):
            limit = math.inf if clip_norm is None else clip_norm
            norm = float(clip_grad_norm_(self._model.parameters(), limit))
        if not math.isfinite(norm):
            raise NonFiniteLossError(f"the gradients' norm is {norm}")
        with self.timer.phase("step"):
            set_rate(self._optimizer, rate)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return norm**2

    def weights(self) -> Tensors:
        """All weights by name."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    def optimizer_state(self) -> Tensors:
        """The optimiser's state by the weights' names."""
        return optimizer_state(self._model, self._optimizer)
