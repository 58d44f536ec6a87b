"""A whole run on the server: rounds, evaluation, and what is written down of them."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from collapipe import wire
from collapipe.config import Settings
from collapipe.errors import CollaPipeError
from collapipe.models.part import Tensors
from collapipe.models.split import SplitModel, build_empty
from collapipe.plan import ClusterPlan
from collapipe.report import RoundReport
from collapipe.run_folder import RunFolder, initial_model
from collapipe.tasks.rows import load_splits
from collapipe.tasks.tokenizer import Tokenizer
from server_app.discovery import discover
from server_app.evaluation import Evaluation, Evaluator
from server_app.heads import Heads
from server_app.link import DecoderLinkServer
from server_app.progress import RunProgress, end_table
from server_app.strategy import CollaPipeStrategy

_SHOWN_UNITS = 12  # in the table at the end


@dataclass
class _History:
    """What the summary is made of."""

    start: float
    losses: list[float] = field(default_factory=list)
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    test: Evaluation | None = None
    rounds: Counter[int] = field(default_factory=Counter)  # that a unit finished
    plans: dict[int, ClusterPlan] = field(default_factory=dict)  # each unit's last

    def add(self, report: RoundReport) -> None:
        self.losses.append(report.train_loss)
        self.samples += report.samples
        self.bytes_up += report.bytes_up
        self.bytes_down += report.bytes_down
        self.rounds.update(report.units)
        self.plans.update({cluster.unit: cluster for cluster in report.plan.clusters})


def train(grid: Grid, settings: Settings) -> None:
    """Train, evaluate and save; the run's folder is complete whatever ends the run.

    Raises what ended it early: a ``CollaPipeError`` or ``KeyboardInterrupt``.
    """
    torch.set_num_threads(settings.pipeline.threads)
    console = Console()
    folder = RunFolder(Path(settings.run_dir))
    folder.write_config(settings.tree)
    splits = load_splits(settings)
    tokenizer = settings.task.train_tokenizer(splits.train)
    folder.write_tokenizer(tokenizer)
    history = _History(time.perf_counter())
    with _summarised(folder, settings, history, console):
        run = _Run(grid, settings, folder, tokenizer, history, console)
        run.rounds()
        history.test = run.evaluator("test").evaluate(run.model())


class _Run:
    """The rounds of a run and the model between them."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        folder: RunFolder,
        tokenizer: Tokenizer,
        history: _History,
        console: Console,
    ) -> None:
        self._grid, self._settings, self._folder = grid, settings, folder
        self._tokenizer, self._history, self._console = tokenizer, history, console
        weights = _weights(initial_model(settings, tokenizer))
        self._arrays = wire.pack_tensors(weights)
        folder.write_weights(weights)

    def model(self) -> SplitModel:
        """The global model as it is now."""
        weights = wire.unpack_tensors(self._arrays)
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        model = build_empty(lambda: SplitModel(spec, vocabulary), weights)
        assert isinstance(model, SplitModel)
        return model

    def evaluator(self, split: str) -> Evaluator:
        """For the rows of a split."""
        task, rows = self._settings.task, getattr(load_splits(self._settings), split)
        return Evaluator(task, rows, self._tokenizer)

    def rounds(self) -> None:
        """Train all rounds."""
        settings, federation = self._settings, self._settings.federation
        planner = settings.build("strategy")
        states = discover(self._grid, federation, self._tokenizer.json_text)
        validation = self.evaluator("validation")
        steps = len(states) * federation.local_steps
        with ExitStack() as stack:
            writer = stack.enter_context(SummaryWriter(str(self._folder.path / "tensorboard")))
            progress = stack.enter_context(RunProgress(self._console, federation.rounds, steps))
            progress.say(_opening(settings, self._folder))
            heads = None
            if settings.server_has_heads:
                link = stack.enter_context(DecoderLinkServer(settings.link, len(states)))
                heads = Heads(settings, self._tokenizer.vocabulary, link, progress.step)
            strategy = CollaPipeStrategy(settings, planner, states, heads)
            for number in range(1, federation.rounds + 1):
                seconds = self._round(number, strategy)
                report = strategy.report
                assert report is not None
                progress.round(report, seconds["round"])
                evaluation = None
                if number % federation.eval_every == 0 or number == federation.rounds:
                    began = time.perf_counter()
                    evaluation = validation.evaluate(self.model())
                    seconds["evaluate"] = time.perf_counter() - began
                    progress.evaluation(number, evaluation)
                self._folder.write_weights(strategy.weights)
                self._history.add(report)
                self._record(report, evaluation, seconds, writer)

    def _round(self, number: int, strategy: CollaPipeStrategy) -> dict[str, float]:
        """Seconds of the round's phases; the new model replaces the old once it is complete."""
        timeout = self._settings.federation.round_timeout_s
        marks = [time.perf_counter()]
        messages = strategy.configure_train(number, self._arrays, ConfigRecord(), self._grid)
        marks.append(time.perf_counter())
        replies = self._grid.send_and_receive(messages, timeout=timeout)
        marks.append(time.perf_counter())
        arrays, _ = strategy.aggregate_train(number, replies)
        assert arrays is not None
        self._arrays = arrays
        marks.append(time.perf_counter())
        phases = ("plan", "train", "aggregate")
        spans = zip(phases, marks, marks[1:], strict=False)
        return {name: end - begin for name, begin, end in spans} | {"round": marks[-1] - marks[0]}

    def _record(
        self,
        report: RoundReport,
        evaluation: Evaluation | None,
        seconds: dict[str, float],
        writer: SummaryWriter,
    ) -> None:
        line = asdict(report)
        if report.plan.certificate is not None:
            line["plan"]["certificate"]["gap"] = report.plan.certificate.gap
        line["seconds"] = {**seconds, **report.seconds}
        line["wall_s"] = time.perf_counter() - self._history.start
        writer.add_scalar("train/loss", report.train_loss, report.round)
        if evaluation is not None:
            line["evaluation_loss"] = evaluation.loss
            line["metric"] = asdict(evaluation.score)
            name = f"evaluation/{evaluation.score.name}"
            writer.add_scalar(name, evaluation.score.value, report.round)
            writer.add_scalar("evaluation/loss", evaluation.loss, report.round)
        self._folder.append_metrics(line)


@contextmanager
def _summarised(
    folder: RunFolder, settings: Settings, history: _History, console: Console
) -> Iterator[None]:
    """Write the summary when the run ends, however it does."""
    status, cause, exit_status = "failed", None, 1
    try:
        yield
        status, exit_status = "completed", 0
    except KeyboardInterrupt:
        status = cause = "interrupted"
        raise
    except CollaPipeError as error:
        cause, exit_status = str(error), error.exit_status
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise
    finally:
        wall_s = time.perf_counter() - history.start
        test, losses = history.test, history.losses
        summary = {
            "status": status,
            "error": cause,
            "exit_status": exit_status,
            "task": settings.task.name,
            "framework": settings.framework.name,
            "seed": settings.seed,
            "metric": asdict(test.score) if test else None,
            "test_loss": test.loss if test else None,
            "train_loss": {"first": losses[0], "last": losses[-1]} if losses else None,
            "rounds_completed": len(losses),
            "samples": history.samples,
            "wall_s": wall_s,
            "bytes_up": history.bytes_up,
            "bytes_down": history.bytes_down,
        }
        folder.write_summary(summary)
        if losses:
            _print_end(console, folder, history, settings.federation.num_units, status, wall_s)


def _print_end(
    console: Console,
    folder: RunFolder,
    history: _History,
    num_units: int,
    status: str,
    wall_s: float,
) -> None:
    rows = {
        "run": f"{status} after {_counted(len(history.losses), 'round')}, {wall_s:.1f} s",
        "train loss": f"{history.losses[0]:.4f} → {history.losses[-1]:.4f}",
    }
    if history.test:
        rows[f"test {history.test.score.name}"] = (
            f"{history.test.score.value:.2f}  ({history.test.score.signature})"
        )
    for unit in range(min(num_units, _SHOWN_UNITS)):
        lately = f", lately {_partition(history.plans[unit])}" if unit in history.plans else ""
        rows[f"unit {unit}"] = _counted(history.rounds[unit], "round") + lately
    if num_units > _SHOWN_UNITS:
        rows["…"] = f"{num_units - _SHOWN_UNITS} more units, see metrics.jsonl"
    rows["bytes"] = f"{history.bytes_up / 1e6:,.1f} MB up, {history.bytes_down / 1e6:,.1f} MB down"
    rows["folder"] = str(folder.path)
    console.print(end_table(rows), soft_wrap=True)


def _partition(plan: ClusterPlan) -> str:
    """Such as ``2 phone-1 + 4 laptop-2; m=4``."""
    held = " + ".join(f"{segment.span.blocks} {segment.device}" for segment in plan.segments)
    return f"{held}; m={plan.num_micro_batches}"


def _opening(settings: Settings, folder: RunFolder) -> str:
    federation, devices = settings.federation, settings.tree["cluster"]["num_devices"]
    units = f"{_counted(federation.num_units, 'unit')} of {_counted(devices, 'device')}"
    steps = _counted(federation.local_steps, "local step")
    return (
        f"{settings.framework.name}: task {settings.task.name}, {units}, "
        f"{_counted(federation.rounds, 'round')} of {steps}, seed {settings.seed}; "
        f"folder {folder.path}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def _weights(model: SplitModel) -> Tensors:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
