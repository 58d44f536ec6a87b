"""A run's curves on an MLflow server, for those who keep theirs there; needs the extra."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from collapipe.config import Settings
from collapipe.errors import ConfigError, StorageError, one_line
from collapipe.runs.folder import RunFolder

_log = logging.getLogger(__name__)
_EXPERIMENT = "collapipe"
_ID = "mlflow_run_id"
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}  # seconds
LogScalars = Callable[[Mapping[str, float], int], None]


@contextmanager
def mlflow_log(uri: str, folder: RunFolder, settings: Settings) -> Iterator[LogScalars]:
    """A function that logs a round's scalars; a resumed run goes on with the run that it began.

    A server that does not answer costs a warning: what it misses is in the run's folder. Raises
    ``ConfigError`` where MLflow is not installed or does not know such an address.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as error:
        raise ConfigError(
            f"tracking.mlflow={uri}: MLflow is not installed; pip install 'collapipe[mlflow]'"
        ) from error
    for name, value in _PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        client = MlflowClient(tracking_uri=uri)
    except Exception as error:  # whatever its client raises
        raise ConfigError(f"tracking.mlflow={uri}: {one_line(error)}") from error
    run_id = ""
    with _warned(f"{uri}: the run"):
        run_id = _known_run(folder) or _new_run(client, folder)
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
    """Warn where MLflow's client raises, whatever it is."""
    try:
        yield
    except StorageError:  # of the run's folder
        raise
    except Exception as error:
        _log.warning("tracking.mlflow: %s is not logged: %s", what, one_line(error))


def _known_run(folder: RunFolder) -> str | None:
    file = folder.path / _ID
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _new_run(client: Any, folder: RunFolder) -> str:
    known = client.get_experiment_by_name(_EXPERIMENT)
    experiment = known.experiment_id if known else client.create_experiment(_EXPERIMENT)
    run_id = str(client.create_run(experiment, run_name=folder.path.name).info.run_id)
    folder.append(_ID, run_id.encode())
    return run_id
