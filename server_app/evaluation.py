"""Evaluate a run's model on the server's rows, on the units' rows, or on both."""

from dataclasses import dataclass

from collapipe.config import Settings
from collapipe.errors import DataError
from collapipe.models.split import SplitModel, build_empty
from collapipe.process.torch_device import moved
from collapipe.report import UnitsEvaluation
from collapipe.runs.rows import load_server_rows
from collapipe.tasks.evaluation import Evaluation, Evaluator, mean_evaluation
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import Split
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.strategy import CollaPipeStrategy


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Figures on the server's rows and on the units' rows; None for rows that are not evaluated."""

    server: Evaluation | None = None
    units: UnitsEvaluation | None = None

    @property
    def bytes_down(self) -> int:
        """Bytes of the weights that were sent to units for the evaluation."""
        return 0 if self.units is None else self.units.bytes_down

    @property
    def first(self) -> Evaluation | None:
        """The evaluation on the server's rows, or else on the units' rows."""
        if self.server is None and self.units is not None and self.units.metric is not None:
            assert self.units.loss is not None
            return Evaluation(self.units.loss, self.units.metric)
        return self.server


class RunEvaluator:
    """Evaluates a run's model on the rows that ``evaluation.where`` selects.

    If units evaluate, the server evaluates each row apart, as units do, so that equal rows give
    equal figures. Raises ``DataError`` if the server's rows cannot be encoded.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._on_server: dict[Split, Evaluator] = {}
        if settings.evaluation.on_server:
            for split, rows in load_server_rows(settings).items():
                try:
                    apart = settings.evaluation.on_units
                    self._on_server[split] = Evaluator(settings.task, rows, tokenizer, apart)
                except DataError as error:
                    raise DataError(f"{split} rows: {error}") from error

    def evaluate(self, split: Split, strategy: CollaPipeStrategy) -> Evaluated:
        """Evaluate the strategy's current model. Raises ``NonFiniteLossError`` if its loss on the
        server's rows is not finite."""
        server = units = None
        if (evaluator := self._on_server.get(split)) is not None:
            server = self._evaluation(evaluator, strategy.model)
        if self._settings.evaluation.on_units:
            units = strategy.evaluate_on_units(split)
        return Evaluated(server, units)

    def _evaluation(self, evaluator: Evaluator, model: GlobalModel) -> Evaluation:
        """Evaluate the average, or if nothing is averaged, the mean over the units' models."""
        if self._settings.framework.aggregate:
            return evaluator.evaluate(self._built(model.whole()))
        units = range(self._settings.federation.num_units)
        return mean_evaluation(
            [evaluator.evaluate(self._built(model.whole(model.of_unit(unit)))) for unit in units]
        )

    def _built(self, weights: Tensors) -> SplitModel:
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        model = build_empty(lambda: SplitModel(spec, vocabulary), weights)
        return moved(model, self._settings.server_device)
