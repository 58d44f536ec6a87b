"""A whole run on the server: rounds, evaluation, and what is written down of them."""

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from flwr.serverapp import Grid
from rich.console import Console

from collapipe.config import Settings
from collapipe.errors import DataError
from collapipe.models.split import SplitModel, build_empty
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model
from collapipe.runs.rows import build_tokenizer, load_splits
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from server_app.checkpoints.checkpoint import Checkpoint, history_of
from server_app.checkpoints.file import CheckpointWriter
from server_app.checkpoints.resumption import check_fits, resumable, rewind_run
from server_app.evaluation import Evaluation, Evaluator, mean_evaluation
from server_app.records.progress import RunProgress
from server_app.records.run_log import RunLog, run_log
from server_app.records.shard_report import write_shard_report
from server_app.records.summary import History, opening, summarised
from server_app.rounds.dry_run import dry_run
from server_app.rounds.results import RoundResult, TrainingState
from server_app.rounds.scheduler import Scheduler
from server_app.rounds.strategy import CollaPipeStrategy
from server_app.units import Units

_log = logging.getLogger(__name__)


def train(grid: Grid, settings: Settings, resume: str | None = None) -> None:
    """Train, evaluate and save; the run's folder is complete whatever ends the run.

    ``resume`` names the checkpoint that the run in the folder goes on from; None: a new run. Raises
    what ended it early: a ``CollaPipeError`` or ``KeyboardInterrupt``.
    """
    torch.set_num_threads(settings.pipeline.threads)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # rounds are told in our own lines
    folder = RunFolder(Path(settings.run_dir), resumed=resume is not None)
    with folder.locked():
        checkpoint = None if resume is None else resumable(settings, resume)
        splits, console = load_splits(settings), Console()
        tokenizer = build_tokenizer(settings, splits.train)
        if checkpoint is not None:
            rewind_run(folder, settings, checkpoint, tokenizer)
        folder.write_config(settings.tree)
        folder.write_overrides(settings.overrides, settings.choices)
        folder.write_tokenizer(tokenizer)
        console.print(opening(settings, folder), highlight=False, markup=False, soft_wrap=True)
        if settings.adapter.name != "none" and settings.model.own_tokenizer is None:
            _log.warning(
                "adapter=lora: the model's weights are random and stay so; begin with trained ones "
                "by model=huggingface model.name=FOLDER_OR_HUB_ID model.pretrained=true"
            )
        history = History(time.perf_counter())
        if checkpoint is not None:
            history = history_of(checkpoint.progress)
            console.print(f"goes on after round {checkpoint.progress.round}", highlight=False)
        with summarised(folder, settings, history, console):
            write_shard_report(settings, folder, console)
            run = _Run(settings, folder, tokenizer, history, console, checkpoint)
            if settings.framework.train:
                run.train(grid)
            else:
                run.plan(grid)


class _Run:
    """The rounds of a run, with its records and checkpoints."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        tokenizer: Tokenizer,
        history: History,
        console: Console,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._history, self._console, self._checkpoint = history, console, checkpoint
        self._writer = CheckpointWriter(settings, folder, tokenizer, history)
        self._done = checkpoint.progress.round if checkpoint else 0
        self._frozen_bytes = 0  # of the history's, in this part of the run
        self._own_models: dict[int, Tensors] = {}
        self._weights: Tensors = {}

    def train(self, grid: Grid) -> None:
        """Train all rounds that are left, then evaluate on the test rows."""
        settings, federation = self._settings, self._settings.federation
        test = self._evaluator("test")  # rows that cannot be encoded are found now
        validation = self._evaluator("validation")
        with ExitStack() as stack:
            log = stack.enter_context(self._run_log())
            steps = federation.num_units * federation.local_steps
            progress = stack.enter_context(RunProgress(self._console, federation.rounds, steps))

            def record(result: RoundResult) -> None:
                self._record(result, log, progress, validation)

            strategy = CollaPipeStrategy(settings, self._tokenizer, record, progress.step)
            if self._checkpoint is not None:
                self._resume(strategy, self._checkpoint)
            arrays = strategy.initial_arrays()
            self._weights = records.unpack_tensors(arrays)
            self._write_models(self._own_models)
            strategy.start(grid, arrays, federation.rounds - self._done)
        self._history.test = self._evaluate(test)

    def plan(self, grid: Grid) -> None:
        """Decide all rounds that are left and count what they cost; nothing is trained."""
        settings, federation = self._settings, self._settings.federation
        scheduler = Scheduler(
            settings, Units(grid, federation, self._tokenizer.pack(), {}).discover()
        )
        if self._checkpoint is not None:
            scheduler.resume_from(self._checkpoint.progress.scheduler)
        rounds = range(self._done + 1, federation.rounds + 1)
        with self._run_log() as log, RunProgress(self._console, federation.rounds, 1) as progress:
            for planned in dry_run(settings, scheduler, rounds):
                report, plan_s = planned.report, planned.plan_s
                progress.round(report, plan_s)
                self._history.add(report)
                log.add(report, planned.request, None, {"plan": plan_s, "round": plan_s})
                self._writer.after(report.round, scheduler.state, TrainingState)

    def _resume(self, strategy: CollaPipeStrategy, checkpoint: Checkpoint) -> None:
        progress, training = checkpoint.progress, checkpoint.training
        check_fits(checkpoint, initial_model(self._settings, self._tokenizer).state_dict())
        strategy.resume_from(progress.round, progress.scheduler, training)
        self._own_models = training.own_models
        for later in (self._folder.path / "model").glob("unit-*.safetensors"):
            later.unlink()  # of units that had not trained by then

    def _record(
        self, result: RoundResult, log: RunLog, progress: RunProgress, validation: Evaluator
    ) -> None:
        """Write down a round that is over, and a checkpoint if it is time."""
        federation, report = self._settings.federation, result.report
        seconds, number, evaluation = dict(result.seconds), report.round, None
        self._weights, self._own_models = result.weights, result.own_models
        self._history.bytes_down += result.frozen_bytes - self._frozen_bytes
        self._frozen_bytes = result.frozen_bytes
        progress.round(report, seconds["round"])
        if number % federation.eval_every == 0 or number == federation.rounds:
            began = time.perf_counter()
            evaluation = self._evaluate(validation)
            seconds["evaluate"] = time.perf_counter() - began
            progress.evaluation(number, evaluation)
        self._write_models(report.units)
        self._history.add(report)
        log.add(report, result.request, evaluation, seconds)
        self._writer.after(number, result.scheduler, result.training_state)

    def _evaluate(self, evaluator: Evaluator) -> Evaluation:
        """The average's; where units have models of their own, the mean of theirs."""
        if self._settings.framework.aggregate:
            return evaluator.evaluate(self._model(self._weights))
        units = range(self._settings.federation.num_units)
        models = [self._own_models.get(unit, self._weights) for unit in units]
        return mean_evaluation([evaluator.evaluate(self._model(weights)) for weights in models])

    def _model(self, weights: Tensors) -> SplitModel:
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        model = build_empty(lambda: SplitModel(spec, vocabulary), weights)
        assert isinstance(model, SplitModel)
        return model

    def _write_models(self, units: Iterable[int]) -> None:
        """The average, or else the models of those ``units``."""
        if self._settings.framework.aggregate:
            self._folder.write_weights(self._weights)
            return
        for unit in units:
            self._folder.write_weights(self._own_models[unit], unit)

    def _evaluator(self, split: str) -> Evaluator:
        task, rows = self._settings.task, getattr(load_splits(self._settings), split)
        try:
            return Evaluator(task, rows, self._tokenizer)
        except DataError as error:
            raise DataError(f"{split} rows: {error}") from error

    def _run_log(self) -> AbstractContextManager[RunLog]:
        return run_log(self._folder, self._settings, self._history.start, self._done + 1)
