"""Record every round while the run is in progress: files for ``collapipe report``, spreadsheets and
Prometheus, and curves for TensorBoard and, with the extra ``mlflow``, for MLflow."""

import gzip
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import ModuleType

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from pydantic import TypeAdapter
from torch.utils.tensorboard import SummaryWriter

from collapipe.config import Settings
from collapipe.deployment.server_folder import own_folder, write_in_run
from collapipe.errors import ConfigError, StorageError, one_line
from collapipe.process.extras import missing
from collapipe.report import RoundReport, RoundTraces, UnitsEvaluation
from collapipe.runs.folder import REQUESTS, TRACES, RunFolder
from optim.planner import RoundRequest
from server_app.evaluation import Evaluated
from server_app.records.summary import History

_log = logging.getLogger(__name__)
_REQUEST = TypeAdapter(RoundRequest)
_TRACES = TypeAdapter(RoundTraces)
_MLFLOW_ID, _EXPERIMENT = "mlflow_run_id", "collapipe"
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}  # seconds
Cell = str | int | float
LogScalars = Callable[[Mapping[str, float], int], None]


@dataclass(frozen=True, slots=True)
class RunLog:
    """Appends each round to ``metrics.jsonl``, ``metrics.csv`` and the curves.

    ``requests.jsonl.gz`` gets each round's request, from which it can be planned again. ``start``
    is the run's start by ``time.perf_counter``.
    """

    folder: RunFolder
    curves: Sequence[LogScalars]
    start: float
    metrics_file: Path | None = None  # for Prometheus

    def add(
        self,
        report: RoundReport,
        request: RoundRequest,
        evaluated: Evaluated,
        seconds: Mapping[str, float],
    ) -> None:
        """Record a round in all files and curves; ``seconds`` are the server's phases."""
        evaluation = evaluated.first
        line = replace(
            report,
            seconds={**seconds, **report.seconds},
            wall_s=time.perf_counter() - self.start,
            evaluation_loss=evaluation.loss if evaluation else None,
            metric=evaluation.score if evaluation else None,
            on_units=evaluated.units,
        )
        planned_from = _REQUEST.dump_json(request) + b"\n"
        self.folder.append(REQUESTS, gzip.compress(planned_from, 1, mtime=0))
        self.folder.append_metrics(line.json_tree())
        if report.traces:
            traced = _TRACES.dump_json(RoundTraces(report.round, report.traces)) + b"\n"
            self.folder.append(TRACES, gzip.compress(traced, 1, mtime=0))
        self.folder.append_row("metrics.csv", csv_row(line))
        for log in self.curves:
            log(_scalars(line), report.round)
        if self.metrics_file is not None:
            write_metrics(self.metrics_file, line)


@contextmanager
def run_log(folder: RunFolder, settings: Settings, history: History) -> Iterator[RunLog]:
    """Open a run's log. In a resumed run, curves after the rounds of ``history`` are removed."""
    with ExitStack() as stack:
        curves = [stack.enter_context(tensorboard_curves(folder, history.num_rounds))]
        if settings.tracking.mlflow:
            mlflow = mlflow_log(settings.tracking.mlflow, folder, settings)
            curves.append(stack.enter_context(mlflow))
        server = own_folder()
        yield RunLog(folder, curves, history.start, server.metrics if server else None)


@contextmanager
def tensorboard_curves(folder: RunFolder, rounds_done: int) -> Iterator[LogScalars]:
    """Yield a function that logs a round's scalars; curves after ``rounds_done`` are removed."""
    # TensorBoard then leaves out an installed TensorFlow, which takes seconds to import and has
    # errors of its own for a full disk.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    purge_step = rounds_done + 1 if rounds_done else None
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


@contextmanager
def mlflow_log(uri: str, folder: RunFolder, settings: Settings) -> Iterator[LogScalars]:
    """Yield a function that logs a round's scalars. A resumed run continues its MLflow run.

    If the MLflow server does not answer, the log has a warning; the run's folder has all figures.
    Raises ``ConfigError`` if MLflow is not installed or cannot use the address.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as error:
        raise ConfigError(f"tracking.mlflow={uri}: {missing('mlflow')}") from error
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        client = MlflowClient(tracking_uri=uri)
    except Exception as error:  # the client has no common error class
        raise ConfigError(f"tracking.mlflow={uri}: {one_line(error)}") from error
    run_id = ""
    with _warned(f"{uri}: the run"):
        file = folder.path / _MLFLOW_ID
        run_id = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not run_id:
            known = client.get_experiment_by_name(_EXPERIMENT)
            experiment = known.experiment_id if known else client.create_experiment(_EXPERIMENT)
            run_id = str(client.create_run(experiment, run_name=folder.path.name).info.run_id)
            folder.append(_MLFLOW_ID, run_id.encode())
        chosen = {"task": settings.task.name, "framework": settings.framework.name}
        params = [Param(name, str(value)) for name, value in chosen.items()]
        client.log_batch(run_id, params=[*params, Param("seed", str(settings.seed))])

    def log(scalars: Mapping[str, float], round_: int) -> None:
        now_ms = int(time.time() * 1000)
        with _warned(f"round {round_}"):
            client.log_batch(run_id, [Metric(n, v, now_ms, round_) for n, v in scalars.items()])

    if not run_id:
        yield lambda *_: None
        return
    status = "FAILED"
    try:
        yield log
        status = "FINISHED"
    finally:
        with _warned("the run's end"):
            client.set_terminated(run_id, status)


@contextmanager
def _warned(what: str) -> Iterator[None]:
    """Turn any error of MLflow's client into a warning."""
    try:
        yield
    except StorageError:  # of the run's folder
        raise
    except Exception as error:
        _log.warning("tracking.mlflow: %s is not logged: %s", what, one_line(error))


def _scalars(line: RoundReport) -> dict[str, float]:
    found: dict[str, float | None] = {
        "train/loss": line.train_loss,
        "round/delay_s": line.cost.delay_s,
        "round/clock_s": line.clock_s,
        "round/units": len(line.units),
    }
    if "train" in line.seconds and (round_s := line.seconds["round"]):
        found["train/tokens_per_s"] = line.input_tokens / round_s
    found |= {f"queue/unit_{unit}": queue for unit, queue in enumerate(line.kept_queues)}
    if line.metric:
        found["evaluation/loss"] = line.evaluation_loss
        found[f"evaluation/{line.metric.name}"] = line.metric.value
    if (units := line.on_units) is not None and units.metric is not None:
        found["evaluation_on_units/loss"] = units.loss
        found[f"evaluation_on_units/{units.metric.name}"] = units.metric.value
    return {name: value for name, value in found.items() if value is not None}


def csv_row(line: RoundReport) -> dict[str, Cell]:
    """Return the cells of a row of ``metrics.csv``. Every run has the same columns, so that tables
    can be joined; a cell is empty if the round has no such figure.

    Units are numbers separated by spaces. ``delay_s`` and energies are modelled; ``plan_s`` …
    ``evaluate_s`` and ``wall_s`` are measured. ``clock_s`` follows ``federation.clock``.
    """
    costs, queues, metric = line.costs.values(), line.kept_queues, line.metric
    units = line.on_units or UnitsEvaluation({}, {})
    joules = (joules for cost in costs for joules in cost.device_energy_j.values())
    scheduled = (cluster.unit for cluster in line.plan.clusters)
    phases = ("plan", "train", "aggregate", "round", "evaluate")
    cells: dict[str, Cell | None] = {
        "round": line.round,
        "train_loss": line.train_loss,
        "evaluation_loss": line.evaluation_loss,
        "metric_name": metric.name if metric else None,
        "metric_value": metric.value if metric else None,
        "units_evaluation_loss": units.loss,
        "units_metric_value": units.metric.value if units.metric else None,
        "evaluated_units": " ".join(str(unit) for unit, rows in units.rows.items() if rows),
        "unevaluated_units": " ".join(map(str, units.failures)),
        "samples": line.samples,
        "target_tokens": line.target_tokens,
        "input_tokens": line.input_tokens,
        "clock_s": line.clock_s,
        "delay_s": line.cost.delay_s,
        "bytes_up": line.bytes_up,
        "bytes_down": line.bytes_down,
        "scheduled_units": " ".join(map(str, scheduled)),
        "trained_units": " ".join(map(str, line.units)),
        "failed_units": " ".join(map(str, line.failures)),
        "excluded_units": " ".join(map(str, line.excluded)),
        "skipped": line.skipped,
        "upload_energy_j": math.fsum(cost.upload_energy_j for cost in costs),
        "device_energy_j": math.fsum(joules),
        "epsilon": line.epsilon,
        "longest_queue": max(queues, default=None),
        "mean_queue": fmean(queues) if queues else None,
        **{f"{phase}_s": line.seconds.get(phase) for phase in phases},
        "wall_s": line.wall_s,
    }
    return {name: "" if value is None else value for name, value in cells.items()}


def write_metrics(file: Path, line: RoundReport) -> None:
    """Replace ``file`` by the figures after a round, which ``collapipe deploy serve`` serves; bytes
    and seconds are of this round only."""
    registry = CollectorRegistry()

    def set_gauge(name: str, words: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"collapipe_{name}", words, registry=registry).set(value)

    def set_gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> None:
        gauge = Gauge(f"collapipe_{name}", words, [label], registry=registry)
        for key, value in values.items():
            gauge.labels(key).set(value)

    set_gauge("round", "Number of finished rounds.", line.round)
    set_gauge("units", "Units that finished the last round.", len(line.units))
    set_gauge("failures", "Scheduled units that failed in the last round.", len(line.failures))
    set_gauge("excluded", "Units that were excluded from the last round.", len(line.excluded))
    set_gauge("samples", "Samples trained on in the last round.", line.samples)
    set_gauge(
        "input_tokens", "Tokens without padding trained on in the last round.", line.input_tokens
    )
    set_gauge("train_loss", "Mean loss over the units' steps.", line.train_loss)
    set_gauge("evaluation_loss", "Loss on the evaluation rows.", line.evaluation_loss)
    set_gauge("wall_seconds", "Seconds since the run began.", line.wall_s)
    set_gauges("seconds", "Seconds of each phase of the last round.", "phase", line.seconds)
    ways = {"up": float(line.bytes_up), "down": float(line.bytes_down)}
    set_gauges("bytes", "Activations, gradients and weights.", "way", ways)
    queues = {str(unit): length for unit, length in enumerate(line.kept_queues)}
    set_gauges("queue", "Virtual queue Y of each unit.", "unit", queues)
    devices = {str(unit): float(len(reports)) for unit, reports in line.devices.items()}
    set_gauges("devices", "Real devices that worked for each unit.", "unit", devices)
    write_in_run(file, generate_latest(registry))
