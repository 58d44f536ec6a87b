"""A whole run on the server: rounds, evaluation, and what is written down of them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from flwr.serverapp import Grid
from rich.console import Console

from collapipe.config import Settings
from collapipe.deployment.server_folder import own_folder
from collapipe.deployment.serving import signed_names
from collapipe.errors import BudgetSpentError, RoundFailedError
from collapipe.formatting import counted
from collapipe.output import lasting_output
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import initial_model, read_tokenizer
from collapipe.runs.rows import load_server_rows, make_tokenizer, tells_words
from collapipe.state import ClusterState
from collapipe.text.tokenizer import Tokenizer
from server_app import reply_limit
from server_app.checkpoints.file import Checkpoint, CheckpointFolder, RunCheckpoints
from server_app.checkpoints.resumption import (
    check_fits,
    check_goes_on,
    load_checkpoint,
    others,
    rewind_run,
)
from server_app.evaluation import Evaluated, RunEvaluator
from server_app.places import Places
from server_app.records.progress import RunProgress
from server_app.records.run_log import RunLog, run_log
from server_app.records.shard_report import add_shard, write_shard_report
from server_app.records.summary import (
    History,
    budget_told,
    noise_told,
    opening,
    summarised,
)
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.results import RoundResult, dry_run
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
    with folder.locked(), _placed(grid, folder) as places:
        if settings.evaluates_on_server:
            load_server_rows(settings)  # what cannot be read is said now
        checkpoint, known = None, None
        if resume is not None:
            checkpoint = load_checkpoint(settings, resume)
            check_goes_on(settings, checkpoint)
            places.of.update(checkpoint.progress.names)
            known = _own_tokenizer(folder)
        units = Units(grid, settings.federation, places=places)
        told = units.rows(known is None, settings.task)
        tokenizer = make_tokenizer(settings, told.values()) if known is None else known
        # all units' words may be as large as the model
        told = {unit: replace(reply, words={}) for unit, reply in told.items()}
        if checkpoint is not None:
            rewind_run(folder, settings, checkpoint, tokenizer)
        folder.write_config(settings)
        folder.write_tokenizer(tokenizer)
        console, history = Console(file=lasting_output()), History(time.perf_counter())
        lines = [opening(settings, folder), budget_told(settings.privacy)]
        if checkpoint is not None:
            history = checkpoint.progress.history
            history.start = time.perf_counter() - checkpoint.progress.wall_s
            missing = others(checkpoint, told, places)
            lines.append(f"goes on after round {checkpoint.progress.round}{missing}")
        for line in filter(None, lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        _warn(settings)
        with summarised(folder, settings, history, console, places.called):
            write_shard_report(told, tokenizer.labels, folder, console)
            run = _Run(settings, folder, tokenizer, history, console, checkpoint, places)
            if settings.framework.train:
                run.train(grid)
            else:
                run.plan(grid)


@contextmanager
def _placed(grid: Grid, folder: RunFolder) -> Iterator[Places]:
    """The places of a run's units. A federation's server notes the run and how large replies may
    be, names units by their keys, and has a place for each."""
    server = own_folder()
    if server is None:
        yield Places()
        return
    run = str(grid.run.run_id)
    server.note_run(run, folder.path)
    reply_limit.expected.note = partial(server.expect_replies, run)
    reserved = {name: place for place, name in enumerate(server.settings().units)}
    try:
        yield Places(signed=partial(signed_names, server), reserved=reserved)
    finally:
        server.forget_questions(run)


def _own_tokenizer(folder: RunFolder) -> Tokenizer | None:
    """Of the units that there were when the run began."""
    model = folder.path / "model"
    return read_tokenizer(model) if (model / "tokenizer.json").exists() else None


def _warn(settings: Settings) -> None:
    """Of what is allowed, and hardly meant."""
    if settings.adapter.name != "none" and settings.model.own_tokenizer is None:
        _log.warning(
            "adapter=lora: the model's weights are random and stay so; begin with trained ones "
            "by model=huggingface model.name=FOLDER_OR_HUB_ID model.pretrained=true"
        )
    if settings.privacy.noise_multiplier and tells_words(settings):
        _log.warning(
            "privacy: the tokeniser is made of units' words, which no noise covers, and stands "
            "in model/; bring one: data.tokenizer=bytes, a folder or a hub's id"
        )


@dataclass
class _Run:
    """The rounds of a run that are left, with its records and checkpoints."""

    settings: Settings
    folder: RunFolder
    tokenizer: Tokenizer
    history: History
    console: Console
    checkpoint: Checkpoint | None
    places: Places

    def __post_init__(self) -> None:
        self._checkpoints = RunCheckpoints(self.settings, self.folder, self.tokenizer)

    def train(self, grid: Grid) -> None:
        """Train, then evaluate on the test rows."""
        federation, done = self.settings.federation, self.history.num_rounds
        # Rows that cannot be encoded are found now.
        evaluator = RunEvaluator(self.settings, self.tokenizer)
        steps = federation.num_units * federation.local_steps
        with (
            run_log(self.folder, self.settings, self.history) as log,
            RunProgress(self.console, federation.rounds, steps, self.places.called) as progress,
        ):
            strategy = CollaPipeStrategy(
                self.settings,
                self.tokenizer,
                lambda result: self._record(
                    result, log, progress, lambda: evaluator.evaluate("validation", strategy)
                ),
                progress.step,
                self.places,
                self.folder.write_account,
                self._checkpoints.begin,
                partial(self._tell_arrival, progress),
            )
            if self.checkpoint is not None:
                first = initial_model(self.settings, self.tokenizer)
                check_fits(self.checkpoint, first.state_dict())
                state, kept = (
                    self.checkpoint.progress.scheduler,
                    CheckpointFolder(self.folder.path).kept,
                )
                training = replace(self.checkpoint.training, units=kept)
                strategy.resume_from(done, state, training, self.folder.account())
                self.history.epsilon = strategy.epsilon
                for later in (self.folder.path / "model").glob("unit-*.safetensors"):
                    later.unlink()  # of units that had not trained by then
            arrays = strategy.initial_arrays()
            weights = sum(each.numel() for each in strategy.model.trained.values())
            if (told := noise_told(self.settings, weights)) is not None:
                self.console.print(told, highlight=False, markup=False, soft_wrap=True)
            self._write_models(strategy.model, strategy.model.own_models)
            try:
                strategy.start(grid, arrays, federation.rounds - done)
            except BudgetSpentError as spent:
                self.history.ended = str(spent)
        if (skipped := self.history.skipped) and skipped == self.history.num_rounds:
            raise RoundFailedError(
                f"nothing was learned: {counted(skipped, 'round')} skipped, all that there were; "
                "metrics.jsonl and the lines above say why"
            )
        evaluated = evaluator.evaluate("test", strategy)
        self.history.test, self.history.test_on_units = evaluated.first, evaluated.units
        self.history.bytes_down += evaluated.bytes_down

    def plan(self, grid: Grid) -> None:
        """Decide the rounds and count what they cost; nothing is trained."""
        federation = self.settings.federation
        units = Units(grid, federation, self.tokenizer.pack(), {}, self.places)
        scheduler = Scheduler(self.settings, units.discover(), self.places.name)
        if self.checkpoint is not None:
            scheduler.resume_from(self.checkpoint.progress.scheduler)
        rounds = range(self.history.num_rounds + 1, federation.rounds + 1)
        with (
            run_log(self.folder, self.settings, self.history) as log,
            RunProgress(self.console, federation.rounds, 1, self.places.called) as progress,
        ):
            for result in dry_run(self.settings, scheduler, rounds):
                self._record(result, log, progress, Evaluated)

    def _tell_arrival(
        self, progress: RunProgress, round_: int, state: ClusterState, new: bool
    ) -> None:
        """A line, and for a ``new`` unit its rows in ``shards.json``."""
        rows = counted(state.num_samples, "row")
        progress.arrival(round_, state.unit, f"joined, {rows}" if new else "is back")
        if new:
            add_shard(self.folder, state, self.places.name(state.unit), round_)

    def _record(
        self,
        result: RoundResult,
        log: RunLog,
        progress: RunProgress,
        evaluate: Callable[[], Evaluated],
    ) -> None:
        """Write down a round that is over, and a checkpoint if it is time."""
        federation, report = self.settings.federation, result.report
        seconds, number, evaluated = dict(result.seconds), report.round, Evaluated()
        progress.round(report, seconds["round"])
        if result.model is not None:
            if number % federation.eval_every == 0 or number == federation.rounds:
                began = time.perf_counter()
                evaluated = evaluate()
                seconds["evaluate"] = time.perf_counter() - began
                progress.evaluation(number, evaluated)
            self._write_models(result.model, report.units)
        self.history.bytes_down += result.bytes_down + evaluated.bytes_down
        self.history.add(report)
        log.add(report, result.request, evaluated, seconds)
        self._checkpoints.write(self.history, result, self.places.of)

    def _write_models(self, model: GlobalModel, units: Iterable[int]) -> None:
        """The average, or else the models of those ``units``."""
        if self.settings.framework.aggregate:
            self.folder.write_weights(model.weights)
            return
        for unit in units:
            self.folder.write_weights(model.own_models[unit], unit)
