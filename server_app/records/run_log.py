"""What is written down of every round, while the run goes on."""

import gzip
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

from pydantic import TypeAdapter
from torch.utils.tensorboard import SummaryWriter

from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.runs.folder import RunFolder
from collapipe.runs.metrics import COLUMNS, Metric, RoundLine, csv_row
from optim.planner import RoundRequest
from server_app.evaluation import Evaluation
from server_app.records.mlflow_log import LogScalars, mlflow_log

REQUESTS = "requests.jsonl.gz"
_REQUEST = TypeAdapter(RoundRequest)


class RunLog:
    """Lines of ``metrics.jsonl`` and ``metrics.csv``, TensorBoard's curves, and in
    ``requests.jsonl.gz`` what each round was planned from, so that it can be planned again."""

    def __init__(self, folder: RunFolder, curves: Sequence[LogScalars], start: float) -> None:
        self._folder, self._curves, self._start = folder, curves, start

    def add(
        self,
        report: RoundReport,
        request: RoundRequest,
        evaluation: Evaluation | None,
        seconds: Mapping[str, float],
    ) -> None:
        """A round's line everywhere."""
        line = RoundLine.of(report, seconds, time.perf_counter() - self._start)
        if evaluation is not None:
            metric = Metric(**asdict(evaluation.score))
            line = replace(line, evaluation_loss=evaluation.loss, metric=metric)
        planned_from = _REQUEST.dump_json(request) + b"\n"
        self._folder.append(REQUESTS, gzip.compress(planned_from, 1, mtime=0))
        self._folder.append_metrics(line.json_tree())
        self._folder.append_row("metrics.csv", COLUMNS, csv_row(line))
        scalars = _scalars(line)
        for log in self._curves:
            log(scalars, report.round)


@contextmanager
def run_log(
    folder: RunFolder, settings: Settings, start: float, first_round: int
) -> Iterator[RunLog]:
    """A run's log; ``start`` is the run's, of ``time.perf_counter``. Curves of an earlier part end
    before ``first_round``."""
    with ExitStack() as stack:
        curves = [stack.enter_context(_tensorboard(folder, first_round))]
        if settings.tracking.mlflow:
            mlflow = mlflow_log(settings.tracking.mlflow, folder, settings)
            curves.append(stack.enter_context(mlflow))
        yield RunLog(folder, curves, start)


@contextmanager
def _tensorboard(folder: RunFolder, first_round: int) -> Iterator[LogScalars]:
    purge_step = first_round if first_round > 1 else None
    with folder.storage_errors("tensorboard"):
        writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step)

    def log(scalars: Mapping[str, float], round_: int) -> None:
        with folder.storage_errors("tensorboard"):
            for name, value in scalars.items():
                writer.add_scalar(name, value, round_)
            writer.flush()

    try:
        yield log
    finally:
        with folder.storage_errors("tensorboard"):
            writer.close()


def _scalars(line: RoundLine) -> dict[str, float]:
    """TensorBoard's names and values."""
    found: dict[str, float | None] = {
        "train/loss": line.train_loss,
        "round/delay_s": line.cost.delay_s if line.cost else None,
        "round/clock_s": line.clock_s,
        "round/units": len(line.units),
    }
    found |= {f"queue/unit_{unit}": queue for unit, queue in enumerate(line.kept_queues)}
    if line.metric:
        found["evaluation/loss"] = line.evaluation_loss
        found[f"evaluation/{line.metric.name}"] = line.metric.value
    return {name: value for name, value in found.items() if value is not None}
