"""A whole run on the server: rounds, evaluation, and what is written down of them."""

import functools
import logging
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from rich.console import Console

from collapipe.config import Settings
from collapipe.errors import DataError
from collapipe.models.split import frozen_names
from collapipe.runs.folder import RunFolder
from collapipe.runs.rows import build_tokenizer, load_splits
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import Failure
from server_app.checkpoints.checkpoint import Checkpoint, Learned
from server_app.checkpoints.kept import collect_kept, give_back
from server_app.checkpoints.resumption import check_fits, check_same_clusters, resumable, take_up
from server_app.checkpoints.writer import CheckpointWriter, history_of
from server_app.decoding.heads import Heads
from server_app.decoding.link import DecoderLinkServer
from server_app.discovery import Discovery, discover, hear_again
from server_app.evaluation import Evaluator
from server_app.global_model import GlobalModel
from server_app.records.progress import RunProgress
from server_app.records.run_log import run_log
from server_app.records.shard_report import write_shard_report
from server_app.records.summary import History, opening, summarised
from server_app.scheduled import scheduled
from server_app.scheduler import Scheduler
from server_app.strategy import CollaPipeStrategy

_log = logging.getLogger(__name__)


def train(grid: Grid, settings: Settings, resume: str | None = None) -> None:
    """Train, evaluate and save; the run's folder is complete whatever ends the run.

    ``resume`` names the checkpoint that the run in the folder goes on from; None: a new run. Raises
    what ended it early: a ``CollaPipeError`` or ``KeyboardInterrupt``.
    """
    torch.set_num_threads(settings.pipeline.threads)
    folder = RunFolder(Path(settings.run_dir), resumed=resume is not None)
    with folder.locked():
        _train(grid, settings, folder, None if resume is None else resumable(settings, resume))


def _train(
    grid: Grid, settings: Settings, folder: RunFolder, checkpoint: Checkpoint | None
) -> None:
    console = Console()
    splits = load_splits(settings)
    tokenizer = build_tokenizer(settings, splits.train)
    if checkpoint is not None:
        take_up(folder, settings, checkpoint, tokenizer)
    folder.write_config(settings.tree)
    folder.write_overrides(settings.overrides, settings.choices)
    folder.write_tokenizer(tokenizer)
    console.print(opening(settings, folder), highlight=False, markup=False, soft_wrap=True)
    if settings.adapter.name != "none" and settings.model.own_tokenizer is None:
        _log.warning(
            "adapter=lora: the model's weights are random and stay so; begin with trained ones: "
            "model=huggingface model.name=FOLDER_OR_HUB_ID model.pretrained=true"
        )
    history = History(time.perf_counter())
    if checkpoint is not None:
        history = history_of(checkpoint.progress)
        console.print(f"goes on after round {checkpoint.progress.round}", highlight=False)
    with summarised(folder, settings, history, console):
        write_shard_report(settings, folder, console)
        run = _Run(grid, settings, folder, tokenizer, history, console, checkpoint)
        if not settings.framework.train:
            run.scheduled_rounds()
            return
        test = run.evaluator("test")  # rows that cannot be encoded are found now
        run.rounds()
        history.test = run.model.evaluate(test)


class _Run:
    """The rounds of a run and the model between them."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        folder: RunFolder,
        tokenizer: Tokenizer,
        history: History,
        console: Console,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._grid, self._settings, self._folder = grid, settings, folder
        self._tokenizer, self._history, self._console = tokenizer, history, console
        self._writer = CheckpointWriter(settings, folder, tokenizer, history)
        self._checkpoint = checkpoint
        self._rounds = range(
            checkpoint.progress.round + 1 if checkpoint else 1, settings.federation.rounds + 1
        )
        self.model = GlobalModel(settings, tokenizer)
        if not settings.framework.train:
            return
        if checkpoint is not None:
            check_fits(checkpoint, self.model.weights)
            self.model.take_up(checkpoint.learned, folder)
        elif settings.framework.aggregate:
            self.model.write(folder, ())

    def evaluator(self, split: str) -> Evaluator:
        """For the rows of a split."""
        task, rows = self._settings.task, getattr(load_splits(self._settings), split)
        try:
            return Evaluator(task, rows, self._tokenizer)
        except DataError as error:
            raise DataError(f"{split} rows: {error}") from error

    def rounds(self) -> None:
        """Train all rounds."""
        settings, federation = self._settings, self._settings.federation
        spec, vocabulary = settings.model, self._tokenizer.vocabulary
        frozen = frozen_names(spec, vocabulary)
        found = self._discover(frozen)
        scheduler = Scheduler(settings, found.reported)
        validation = self.evaluator("validation")
        num_units = federation.num_units
        with ExitStack() as stack:
            log = stack.enter_context(
                run_log(self._folder, settings, self._history.start, self._rounds.start)
            )
            steps = num_units * federation.local_steps
            progress = stack.enter_context(RunProgress(self._console, federation.rounds, steps))
            heads = None
            if settings.server_has_heads:
                link = stack.enter_context(DecoderLinkServer(settings.link, num_units))
                heads = Heads(settings, vocabulary, link, progress.step, frozen)
            strategy = CollaPipeStrategy(settings, scheduler, found.units, heads, frozen)
            self._take_up(found, scheduler, strategy, heads)
            for number in self._rounds:
                self._hear_again(found, scheduler)
                seconds = self._round(number, strategy)
                report, decision = strategy.report, strategy.decision
                assert report is not None
                assert decision is not None
                progress.round(report, seconds["round"])
                evaluation = None
                if number % federation.eval_every == 0 or number == federation.rounds:
                    began = time.perf_counter()
                    evaluation = self.model.evaluate(validation)
                    seconds["evaluate"] = time.perf_counter() - began
                    progress.evaluation(number, evaluation)
                self.model.write(self._folder, report.units)
                self._history.add(report)
                log.add(report, decision.request, evaluation, seconds)
                learned = functools.partial(self._learned, found, strategy, heads)
                self._writer.after(number, scheduler.state, learned)

    def scheduled_rounds(self) -> None:
        """Decide all rounds and count what they cost; nothing is trained."""
        settings, rounds = self._settings, self._settings.federation.rounds
        found = self._discover(frozenset())
        scheduler = Scheduler(settings, found.reported)
        if self._checkpoint is not None:
            scheduler.state = self._checkpoint.progress.scheduler
        with (
            run_log(self._folder, settings, self._history.start, self._rounds.start) as log,
            RunProgress(self._console, rounds, 1) as progress,
        ):
            for each in scheduled(settings, scheduler, self._rounds):
                report, seconds = each.report, {"plan": each.plan_s, "round": each.plan_s}
                progress.round(report, each.plan_s)
                self._history.add(report)
                log.add(report, each.request, None, seconds)
                self._writer.after(report.round, scheduler.state, Learned)

    def _discover(self, frozen: Collection[str]) -> Discovery:
        federation = self._settings.federation
        parts = self.model.frozen_parts(frozen)
        found = discover(self._grid, federation, self._tokenizer.pack(), parts)
        self._history.bytes_down += found.frozen_bytes
        if self._checkpoint is not None:
            check_same_clusters(self._settings, self._checkpoint, found.reported)
        return found

    def _take_up(
        self,
        found: Discovery,
        scheduler: Scheduler,
        strategy: CollaPipeStrategy,
        heads: Heads | None,
    ) -> None:
        """All go on from what was at the checkpoint, if there is one."""
        if self._checkpoint is None:
            return
        learned = self._checkpoint.learned
        scheduler.state = self._checkpoint.progress.scheduler
        strategy.own_models = self.model.own_models
        strategy.server_optimizer.restore(learned.server_optimizer)
        if heads is not None:
            heads.states = dict(learned.heads)
        give_back(self._grid, self._settings.federation, found.units, learned.units)

    def _learned(
        self, found: Discovery, strategy: CollaPipeStrategy, heads: Heads | None
    ) -> Learned:
        """What a checkpoint keeps of the training, the units' part included."""
        return Learned(
            self.model.weights,
            self.model.own_models,
            strategy.server_optimizer.state,
            heads.states if heads is not None else {},
            collect_kept(self._grid, self._settings.federation, found.units),
        )

    def _hear_again(self, found: Discovery, scheduler: Scheduler) -> None:
        """Units that told nonsense may tell sense by now."""
        reported = scheduler.state.reported
        units = [unit for unit, told in enumerate(reported) if isinstance(told, Failure)]
        if units:
            scheduler.hear(hear_again(self._grid, self._settings.federation, found, units))

    def _round(self, number: int, strategy: CollaPipeStrategy) -> dict[str, float]:
        """Seconds of the round's phases; the new model replaces the old once it is complete."""
        timeout = self._settings.federation.round_timeout_s
        marks = [time.perf_counter()]
        messages = strategy.configure_train(number, self.model.arrays, ConfigRecord(), self._grid)
        marks.append(time.perf_counter())
        replies = self._grid.send_and_receive(messages, timeout=timeout)
        marks.append(time.perf_counter())
        arrays, _ = strategy.aggregate_train(number, replies)
        self.model.arrays = arrays or self.model.arrays
        self.model.own_models = strategy.own_models
        marks.append(time.perf_counter())
        phases = ("send", "train", "aggregate")
        spans = zip(phases, marks, marks[1:], strict=False)
        seconds = {name: end - begin for name, begin, end in spans}
        seconds["plan"] = strategy.plan_s  # a part of send
        return {**seconds, "round": marks[-1] - marks[0]}
