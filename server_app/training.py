"""A whole run on the server: rounds, evaluation and records."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flwr.serverapp import Grid
from rich.console import Console

from collapipe.config import Settings
from collapipe.config.idle import unused_options
from collapipe.deployment.server_folder import own_folder
from collapipe.deployment.serving import signed_names
from collapipe.errors import BudgetSpentError, RoundFailedError, StorageError, few_of
from collapipe.flower import reply_limit
from collapipe.formatting import counted, print_line
from collapipe.models.cut import without_cut
from collapipe.process.streams import lasting_output
from collapipe.process.torch_device import use_threads
from collapipe.runs.folder import RunFolder
from collapipe.runs.model import base_of, begin, read_tokenizer
from collapipe.runs.rows import load_server_rows, make_tokenizer, sends_words
from collapipe.text.tokenizer import Tokenizer
from server_app.checkpoints.file import Checkpoint
from server_app.checkpoints.folder import CheckpointFolder
from server_app.checkpoints.resumption import (
    check_model,
    check_resumable,
    load_checkpoint,
    others,
    rewind_run,
)
from server_app.checkpoints.writing import RunCheckpoints
from server_app.decoding.link import decoder_link
from server_app.evaluation import Evaluated, RunEvaluator
from server_app.places import Places
from server_app.planning.scheduler import Scheduler
from server_app.records.progress import RunProgress
from server_app.records.run_log import RunLog, run_log
from server_app.records.shard_report import add_shard, write_shard_report
from server_app.records.summary import History, budget_text, noise_warning, opening, summarised
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.results import RoundResult, RunState, dry_run
from server_app.rounds.strategy import CollaPipeStrategy
from server_app.units import Units

_log = logging.getLogger(__name__)


def train(grid: Grid, settings: Settings, resume: str | None = None) -> None:
    """Train, evaluate and save. The run's folder is complete even if the run ends with an error.

    ``resume`` names the checkpoint from which the run in the folder is resumed; None begins a new
    run. Raises the ``CollaPipeError`` or ``KeyboardInterrupt`` that ended the run early.
    """
    use_threads(settings.pipeline.threads, settings.computing_at_once)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # this package prints its own lines
    if settings.framework.train:
        with decoder_link(settings):  # raises early if its port is taken
            pass
    folder = RunFolder(Path(settings.run_dir), resumed=resume is not None)
    with folder.locked(), _placed(grid, folder) as places:
        if settings.evaluates_on_server:
            load_server_rows(settings)  # raises early if the rows cannot be read
        checkpoint, known = None, None
        if resume is not None:
            checkpoint = load_checkpoint(settings, resume)
            check_resumable(settings, checkpoint)
            places.of.update(checkpoint.progress.names)
            model = folder.path / "model"  # has the tokeniser that was made when the run began
            known = read_tokenizer(model) if (model / "tokenizer.json").exists() else None
        units = Units(grid, settings, places=places)
        replies = units.rows(known is None, settings.task)
        tokenizer = make_tokenizer(settings, replies.values()) if known is None else known
        # the words of all units may need as much memory as the model
        replies = {unit: replace(reply, words={}) for unit, reply in replies.items()}
        if checkpoint is not None:
            check_model(folder, settings, checkpoint, tokenizer)
        folder.write_tokenizer(tokenizer)
        folder.write_config(settings)
        console, history = Console(file=lasting_output()), History(time.perf_counter())
        lines = [opening(settings, folder), budget_text(settings.privacy)]
        if checkpoint is not None:
            rewind_run(folder, settings, checkpoint)  # only now: it removes the summary
            history = checkpoint.progress.history
            history.start = time.perf_counter() - checkpoint.progress.wall_s
            missing = others(checkpoint, replies, places)
            lines.append(f"resumes after round {checkpoint.progress.round}{missing}")
        for line in filter(None, lines):
            print_line(console, line)
        _warn(settings)
        with summarised(folder, settings, history, console, places.called):
            write_shard_report(replies, tokenizer.labels, folder, console)
            run = _Run(settings, folder, tokenizer, history, console, checkpoint, places)
            if settings.framework.train:
                run.train(grid)
            else:
                run.plan(grid)


@contextmanager
def _placed(grid: Grid, folder: RunFolder) -> Iterator[Places]:
    """Yield the places of a run's units.

    A federation's server also records the run and its reply limits, names units by their
    certificates, and reserves a place for each unit.
    """
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


def _warn(settings: Settings) -> None:
    for line in unused_options(settings):
        _log.warning("%s", line)
    whole, _ = without_cut(settings.model, {})
    if getattr(whole, "untied", dict)():  # models of transformers without adapters have it
        _log.warning(
            "the model shares one embedding between input and output; here two copies of it train "
            "separately"
        )
    if settings.adapter.name != "none" and settings.model.own_tokenizer is None:
        _log.warning(
            "adapter=lora: the frozen weights are random; start with pretrained ones by "
            "model=huggingface model.name=FOLDER_OR_HUB_ID model.pretrained=true"
        )
    if settings.privacy.noise_multiplier and sends_words(settings):
        _log.warning(
            "privacy: the tokeniser in model/ is made of the units' words, which no noise "
            "protects; set data.tokenizer=bytes, a folder or a hub's id"
        )


@dataclass
class _Run:
    """Runs the remaining rounds of a run, with records and checkpoints."""

    settings: Settings
    folder: RunFolder
    tokenizer: Tokenizer
    history: History
    console: Console
    checkpoint: Checkpoint | None
    places: Places
    _rows: dict[int, int] = field(default_factory=dict)  # of each unit when it last took part
    _log: RunLog = field(init=False)  # while it is open
    _progress: RunProgress = field(init=False)

    def __post_init__(self) -> None:
        self._checkpoints = RunCheckpoints(self.settings, self.folder, self.tokenizer)

    def train(self, grid: Grid) -> None:
        """Train, then evaluate on the test rows."""
        # Raises early if rows cannot be encoded.
        evaluator = RunEvaluator(self.settings, self.tokenizer)
        federation = self.settings.federation
        steps = federation.num_units * federation.local_steps
        with self._records(steps):
            strategy = self._strategy()
            weights = sum(each.numel() for each in strategy.model.weights.values())
            if (warning := noise_warning(self.settings, weights)) is not None:
                print_line(self.console, warning)
            self._write_models(strategy.model, strategy.model.own_models)
            try:
                with strategy.opened(grid):
                    for round_ in range(self.history.num_rounds + 1, federation.rounds + 1):
                        self._round(round_, strategy, evaluator)
            except BudgetSpentError as spent:  # the run ends early and keeps its model
                self.history.ended = str(spent)
            finally:
                self.history.epsilon = strategy.epsilon  # also of a round that is not recorded
        self._check_rounds("learned")
        evaluated = evaluator.evaluate("test", strategy)
        self.history.test, self.history.test_on_units = evaluated.first, evaluated.units
        self.history.bytes_down += evaluated.bytes_down

    def _round(self, round_: int, strategy: CollaPipeStrategy, evaluator: RunEvaluator) -> None:
        result = strategy.run_round(round_, self._checkpoints.begin(round_))
        self._show(result)
        evaluated, evaluate_s = self._evaluated(round_, evaluator, strategy)
        try:
            self._write_models(strategy.model, result.report.units)
        except StorageError as error:  # the states for the checkpoint may have filled the disk
            if not self._checkpoints.abandon(round_, error):
                raise
            self._write_models(strategy.model, result.report.units)
        self._record(result, evaluated, evaluate_s)
        self._checkpoints.write(self.history, strategy.state(), self.places.of)

    def plan(self, grid: Grid) -> None:
        """Plan the rounds and compute their cost without training."""
        federation = self.settings.federation
        units = Units(grid, self.settings, self.tokenizer.pack(), places=self.places)
        scheduler = Scheduler(self.settings, self.places.name)
        state = scheduler.begin(units.discover())
        if self.checkpoint is not None:
            state = scheduler.resumed(self.checkpoint.progress.scheduler, state.roster)
        rounds = range(self.history.num_rounds + 1, federation.rounds + 1)
        with self._records(1):
            for result, then in dry_run(self.settings, scheduler, state, rounds):
                self._checkpoints.begin(result.report.round)
                self._show(result)
                self._record(result)
                self._checkpoints.write(self.history, RunState(then), self.places.of)
        self._check_rounds("planned")

    def _check_rounds(self, what: str) -> None:
        """Raise ``RoundFailedError`` if all rounds were skipped."""
        if (skipped := self.history.skipped) and skipped == self.history.num_rounds:
            raise RoundFailedError(
                f"nothing was {what}: all rounds ({skipped}) were skipped; metrics.jsonl and the "
                "lines above have the causes"
            )

    def _strategy(self) -> CollaPipeStrategy:
        """Make the strategy, with the checkpoint's state in a resumed run."""
        state = account = None
        where = self.folder.path, self.settings, self.tokenizer.vocabulary
        if self.checkpoint is None:
            weights, base = begin(*where)
        else:
            weights, base = self.checkpoint.training.weights, base_of(*where)
            kept = CheckpointFolder(self.folder.path).kept
            training = replace(self.checkpoint.training, units=kept)
            state = RunState(self.checkpoint.progress.scheduler, training)
            account = self.folder.account()
            for later in (self.folder.path / "model").glob("unit-*.safetensors"):
                later.unlink()  # may belong to units that had not trained at the checkpoint
        self.folder.write_base(base.digests)
        strategy = CollaPipeStrategy(
            self.settings,
            self.tokenizer,
            places=self.places,
            on_step=self._progress.step,
            on_account=self.folder.write_account,
            state=state,
            account=account,
        )
        model = strategy.model
        model.weights, model.fixed, model.digests = weights, base, base.digests
        if state is not None:
            self.history.epsilon = strategy.epsilon
        return strategy

    @contextmanager
    def _records(self, steps_per_round: int) -> Iterator[None]:
        rounds, called = self.settings.federation.rounds, self.places.called
        tokens = "causal" in self.settings.task.heads  # rows of text to continue have any length
        with (
            run_log(self.folder, self.settings, self.history) as self._log,
            RunProgress(self.console, rounds, steps_per_round, called, tokens) as self._progress,
        ):
            yield

    def _evaluated(
        self, round_: int, evaluator: RunEvaluator, strategy: CollaPipeStrategy
    ) -> tuple[Evaluated | None, float]:
        """Return the evaluation after a round, or None if it is not due, and its seconds."""
        federation = self.settings.federation
        if round_ % federation.eval_every and round_ != federation.rounds:
            return None, 0.0
        began = time.perf_counter()
        return evaluator.evaluate("validation", strategy), time.perf_counter() - began

    def _show(self, result: RoundResult) -> None:
        """Show a finished round and the units that joined before it; record new ones' rows."""
        report = result.report
        for each in result.arrivals:
            unit, rows = each.cluster.unit, each.cluster.num_samples
            before = self._rows.get(unit, rows)
            how = f"joined, {counted(rows, 'row')}" if each.new else "is back"
            how += f", {counted(rows, 'row')} instead of {before}" if rows != before else ""
            self._progress.print_line(f"round {report.round}: {self.places.called(unit)} {how}")
            if each.new or rows != before:
                joined = report.round if each.new else None
                add_shard(self.folder, each.cluster, self.places.name(unit), joined)
        there = {each.unit: each.num_samples for each in result.request.clusters}
        self._name_small(there)
        self._rows |= {unit: rows for unit, rows in there.items() if rows}
        self._progress.round(report, result.seconds["round"])

    def _name_small(self, there: Mapping[int, int]) -> None:
        """Name the units that are new and have fewer rows than a batch; ``there`` has each unit's
        rows."""
        size, called = self.settings.batch_size, self.places.called
        small = ((unit, rows) for unit, rows in there.items() if 0 < rows < size)
        if few := [f"{called(unit)}: {rows}" for unit, rows in small if unit not in self._rows]:
            _log.warning(
                "units with fewer rows than batch_size=%d take all rows in each step (%s)",
                *(size, few_of(few, ", ")),
            )

    def _record(
        self, result: RoundResult, evaluated: Evaluated | None = None, evaluate_s: float = 0.0
    ) -> None:
        """Record a finished round with its evaluation, and show the evaluation."""
        report, seconds = result.report, dict(result.seconds)
        if evaluated is not None:
            self._progress.evaluation(report.round, evaluated)
            seconds["evaluate"] = evaluate_s
        found = evaluated or Evaluated()
        self.history.bytes_down += result.bytes_down + found.bytes_down
        self.history.rounds_s += result.seconds["round"]
        self.history.add(report)
        self._log.add(report, result.request, found, seconds)

    def _write_models(self, model: GlobalModel, units: Iterable[int]) -> None:
        """Write the average, or if nothing is averaged, the models of ``units``."""
        if self.settings.framework.aggregate:
            self.folder.write_weights(model.weights)
            return
        for unit in units:
            self.folder.write_weights(model.own_models[unit], unit)
