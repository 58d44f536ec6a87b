"""``collapipe run``: one job or a sweep, in this process or on Flower's simulation engine."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from collapipe import config
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError

_QUIET = {
    "GRPC_VERBOSITY": "NONE",  # what matters comes as an error of ours
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_job(overrides: Sequence[str]) -> None:
    """Train once. Raises ``CollaPipeError`` or ``KeyboardInterrupt``."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    settings = config.load_overrides(overrides)
    settled = _absolute(overrides, settings)
    if settings.runtime.name == "simulation":
        _run_simulated(settled, settings)
    else:
        _run_local(settled, settings)


def run_sweep(overrides: Sequence[str]) -> None:
    """Every combination, one after the other, each in a numbered folder."""
    folder = Path(config.sweep_dir(overrides))
    for number, job in enumerate(config.expand(overrides)):
        print(f"job {number}: {config.join(job)}")
        run_job([*job, f"hydra.run.dir={config.quoted(folder / str(number))}"])


def _run_local(overrides: Sequence[str], settings: Settings) -> None:
    # Imported here: simulations run these rooms in other processes.
    from flwr.app import UserConfig

    from client_app.app import app as client
    from server_app.grid import InlineGrid
    from server_app.training import train

    logging.getLogger("flwr").setLevel(logging.WARNING)
    run_config: UserConfig = {"overrides": config.join(overrides)}
    grid = InlineGrid(client, settings.federation.num_units, run_config)
    train(grid, config.load(run_config))


def _run_simulated(overrides: Sequence[str], settings: Settings) -> None:
    from collapipe.cli.simulation import run_simulation
    from collapipe.run_folder import RunFolder
    from collapipe.tasks.rows import load_splits

    # What is wrong with folders and data is said here, before Flower has started anything.
    RunFolder(Path(settings.run_dir))
    load_splits(settings)
    if run_simulation(Path(__file__).parents[2], overrides, settings.federation.num_units):
        raise _cause(Path(settings.run_dir) / "summary.json")


def _cause(summary: Path) -> CollaPipeError:
    """What ended a simulated run, as its ServerApp wrote it down."""
    if not summary.exists():
        return RoundFailedError("the simulated run failed; its last lines above say why")
    ended = json.loads(summary.read_text(encoding="utf-8"))
    kind = ConfigError if ended["exit_status"] == ConfigError.exit_status else RoundFailedError
    return kind(ended["error"])


def _absolute(overrides: Sequence[str], settings: Settings) -> list[str]:
    """Overrides that mean the same in another working directory, and at another second."""
    settled = [*overrides, f"hydra.run.dir={config.quoted(Path(settings.run_dir).resolve())}"]
    if settings.data.root is not None:
        settled.append(f"data.root={config.quoted(Path(settings.data.root).resolve())}")
    return settled
