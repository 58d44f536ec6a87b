"""The model between rounds: one of all units, or each unit's own where nothing is averaged."""

from collections.abc import Collection

from flwr.app import ArrayRecord

from collapipe.config import Settings
from collapipe.models.part import select
from collapipe.models.split import EMBEDDING, HEAD, SplitModel, block_name, build_empty
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from server_app.checkpoints.checkpoint import Learned
from server_app.evaluation import Evaluation, Evaluator, mean_evaluation


class GlobalModel:
    """Weights as the last round left them.

    Attributes
    ----------
    arrays
        What units are sent: the average, or the first weights where nothing is averaged.
    own_models
        Where nothing is averaged: unit → its weights, once it has trained.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        first = initial_model(settings, tokenizer).state_dict()
        self.arrays: ArrayRecord = records.pack_tensors(
            {name: tensor.detach() for name, tensor in first.items()}
        )
        self.own_models: dict[int, Tensors] = {}

    @property
    def weights(self) -> Tensors:
        """Those of ``arrays``."""
        return records.unpack_tensors(self.arrays)

    def take_up(self, learned: Learned, folder: RunFolder) -> None:
        """Go on with what a checkpoint has, in the folder, too."""
        self.arrays = records.pack_tensors(learned.weights)
        self.own_models = dict(learned.own_models)
        for later in (folder.path / "model").glob("unit-*.safetensors"):
            later.unlink()  # of units that had not trained by then
        self.write(folder, self.own_models)

    def write(self, folder: RunFolder, units: Collection[int]) -> None:
        """As files: the average, or else the models of those ``units``."""
        if self._settings.framework.aggregate:
            folder.write_weights(self.weights)
            return
        for unit in units:
            folder.write_weights(self.own_models[unit], unit)

    def evaluate(self, evaluator: Evaluator) -> Evaluation:
        """The average's; where units have models of their own, the mean of theirs."""
        first = self.weights
        if self._settings.framework.aggregate:
            return evaluator.evaluate(self._model(first))
        units = range(self._settings.federation.num_units)
        models = [self.own_models.get(unit, first) for unit in units]
        return mean_evaluation([evaluator.evaluate(self._model(each)) for each in models])

    def frozen_parts(self, frozen: Collection[str]) -> dict[str, Tensors]:
        """The weights of those names in the parts that units hold: part → tensors."""
        if not frozen:
            return {}
        weights = {name: tensor for name, tensor in self.weights.items() if name in frozen}
        blocks = map(block_name, range(self._settings.model.num_blocks))
        head = [] if self._settings.server_has_heads else [HEAD]
        parts = {name: select(weights, name) for name in (EMBEDDING, *blocks, *head)}
        return {name: tensors for name, tensors in parts.items() if tensors}

    def _model(self, weights: Tensors) -> SplitModel:
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        model = build_empty(lambda: SplitModel(spec, vocabulary), weights)
        assert isinstance(model, SplitModel)
        return model
