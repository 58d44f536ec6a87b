"""``collapipe run``: one job, in this process or on Flower's simulation engine."""

import itertools
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from collapipe import config
from collapipe.config import Settings, quoted
from collapipe.config.overrides import join, parse
from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError
from collapipe.own_packages import find_own_packages_first

_QUIET = {
    "GRPC_VERBOSITY": "NONE",  # what matters comes as an error of ours
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_job(overrides: Sequence[str] = (), config_file: Path | None = None) -> Path:
    """Train once, as ``collapipe run`` does, and return the run's folder.

    ``overrides`` go over the options of ``config_file``, see ``config.own_overrides``.

    Raises ``CollaPipeError`` or ``KeyboardInterrupt``.
    """
    find_own_packages_first()
    quieten()
    overrides = config.own_overrides(overrides, config_file)
    settings = config.load_overrides(overrides)
    chosen = any(each.key_or_group == "hydra.run.dir" for each in parse(overrides))
    folder = unused_folder(Path(settings.run_dir), chosen)
    try:
        start(_absolute(overrides, settings, folder), settings)
    except CollaPipeError:
        if not chosen and not any(folder.iterdir()):  # nothing came of it
            folder.rmdir()
        raise
    return folder


def unused_folder(folder: Path, chosen: bool) -> Path:
    """Where to write: as ``chosen``, or else a new folder that no other start of this second has.

    Raises ``ConfigError`` where it cannot be made.
    """
    folder = folder.resolve()
    for number in itertools.count(2):
        if chosen:
            break
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = folder.with_name(f"{folder.name.partition('_')[0]}_{number}")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from error
    return folder


def quieten() -> None:
    """Libraries say nothing of their own, unless the environment wants them to."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})


def start(overrides: Sequence[str], settings: Settings, resume: str | None = None) -> None:
    """Train, from the checkpoint ``resume`` on if there is one; ``overrides`` give ``settings``
    wherever the apps run. Raises as ``run_job``."""
    if settings.runtime.name == "simulation":
        _run_simulated(overrides, settings, resume)
    else:
        _run_local(overrides, settings, resume)


def _run_local(overrides: Sequence[str], settings: Settings, resume: str | None) -> None:
    # Imported here: simulations run these rooms in other processes.
    from flwr.app import UserConfig

    from client_app.app import app as client
    from server_app.grid import InlineGrid
    from server_app.training import train

    logging.getLogger("flwr").setLevel(logging.WARNING)
    run_config: UserConfig = {"overrides": join(overrides)}
    grid = InlineGrid(client, settings.federation.num_units, run_config)
    train(grid, config.load(run_config), resume)


def _run_simulated(overrides: Sequence[str], settings: Settings, resume: str | None) -> None:
    from collapipe.cli.simulation import run_simulation
    from collapipe.runs.folder import RunFolder
    from collapipe.runs.rows import load_splits

    # What is wrong with folders and data is said here, before Flower has started anything.
    with RunFolder(Path(settings.run_dir), resumed=resume is not None).locked():
        load_splits(settings)
    units = settings.federation.num_units
    if not run_simulation(Path(__file__).parents[2], overrides, units, resume or ""):
        raise _cause(Path(settings.run_dir) / "summary.json")


def _cause(summary: Path) -> CollaPipeError:
    """What ended a simulated run, as its ServerApp wrote it down."""
    if not summary.exists():
        return RoundFailedError("the simulated run failed; its last lines above say why")
    ended = json.loads(summary.read_text(encoding="utf-8"))
    kind = ConfigError if ended["exit_status"] == ConfigError.exit_status else RoundFailedError
    return kind(ended["error"])


def _absolute(overrides: Sequence[str], settings: Settings, folder: Path) -> list[str]:
    """Overrides that mean the same in another working directory, and at another second."""
    settled = [*overrides, f"hydra.run.dir={quoted(folder)}"]
    named = {f"data.{option}": path for option, path in settings.data.paths().items()}
    models = {
        "data.tokenizer": settings.data.tokenizer,
        "model.name": settings.tree["model"].get("name"),
    }
    named |= {option: Path(name) for option, name in models.items() if name and Path(name).is_dir()}
    inventory = settings.tree["cluster"].get("file")
    named |= {"cluster.file": Path(inventory)} if inventory else {}
    return [*settled, *(f"{o}={quoted(path.resolve())}" for o, path in named.items())]
