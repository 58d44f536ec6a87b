"""``collapipe run``: one job or a sweep, in this process or on Flower's simulation engine."""

import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from collapipe import config
from collapipe.config import Outline, Settings
from collapipe.config.composing import sweep_dir
from collapipe.config.overrides import expand, parse, setting
from collapipe.deployment.server_folder import with_folder
from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError, printable
from collapipe.formatting import print_table
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
    overrides = with_folder(config.own_overrides(overrides, config_file))
    settings: Settings | Outline = config.outline(overrides)
    if not _checked_on_the_server(settings):
        settings = config.load_overrides(overrides)
        if _leaves_evaluation(settings):
            overrides = [*overrides, "evaluation.where=units"]
            settings = config.load_overrides(overrides)
    chosen = _is_set("hydra.run.dir", overrides)
    folder = unused_folder(Path(settings.run_dir), chosen)
    try:
        start(_absolute(overrides, settings, folder), settings)
    except CollaPipeError:
        if not chosen and not any(folder.iterdir()):  # nothing came of it
            folder.rmdir()
        raise
    return folder


def _checked_on_the_server(settings: Settings | Outline) -> bool:
    """Whether the server's app, on this machine, checks what an outline does not: it does so before
    it asks any unit, and the run is submitted in a tenth of the time."""
    federation = settings.runtime.federation
    deployed = settings.runtime.name == "deployment" and Path(str(federation)).is_dir()
    return deployed and settings.data.name is None


def _leaves_evaluation(settings: Settings) -> bool:
    """Whether ``evaluation.where=auto`` is ``units``, which of the hub's data sets no option tells,
    but their splits."""
    automatic = settings.tree["evaluation"]["where"] == "auto" and settings.evaluates_on_server
    if not automatic or settings.data.name is None:
        return False
    from collapipe.runs.rows import draws_held_out  # which takes seconds

    return draws_held_out(settings)


def run_sweep(overrides: Sequence[str], config_file: Path | None = None) -> None:
    """Train each combination in a numbered folder, then print a table of all.

    Whatever is wrong with the options of any job is raised before the first one trains; a job that
    fails later does not stop the others. Raises ``RoundFailedError`` in the end where one did.
    """
    jobs = [config.own_overrides(job, config_file) for job in expand(overrides)]
    where = Path(sweep_dir(overrides))
    for job in jobs:
        check_devices(config.load_overrides([*job, setting("hydra.run.dir", where / "0")]))
    folder = unused_folder(where, chosen=_is_set("hydra.sweep.dir", overrides))
    folders = [folder / str(number) for number in range(len(jobs))]
    names = [
        shlex.join([each for each in job if any(each not in other for other in jobs)])
        for job in jobs
    ]
    causes: list[str | None] = []
    try:
        for number, (job, run_dir) in enumerate(zip(jobs, folders, strict=True)):
            print(f"job {number} of 0 … {len(jobs) - 1}: {names[number]}")
            causes.append(_failure([*job, setting("hydra.run.dir", run_dir)]))
    finally:
        _print_table(names, folders, causes)
    failed = [number for number, cause in enumerate(causes) if cause is not None]
    if failed:
        raise RoundFailedError(
            f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(map(str, failed))}"
        )


def _failure(overrides: Sequence[str]) -> str | None:
    """Why a job failed, printed at once; None where it did not."""
    try:
        run_job(overrides)
    except CollaPipeError as error:
        cause = printable(str(error))
        print(f"error: {cause}", file=sys.stderr)
        return cause
    except Exception as error:  # a user's class may raise anything, and the other jobs go on
        traceback.print_exc()
        return f"{type(error).__name__}: {printable(str(error))}"
    return None


def _print_table(
    names: Sequence[str], folders: Sequence[Path], causes: Sequence[str | None]
) -> None:
    """A row for each job that ended, and the command that compares those that have metrics."""
    rows = [
        [str(number), names[number], *_results(folders[number], cause)]
        for number, cause in enumerate(causes)
    ]
    print_table(Console(), ["job", "options", "status", "train loss", "test", "clock"], rows)
    compared = [str(each) for each in folders if (each / "metrics.jsonl").exists()]
    if compared:
        print(f"report: {shlex.join(['collapipe', 'report', *compared])}")


def _results(folder: Path, cause: str | None) -> list[str]:
    """Status, last training loss, test metric and clock of a job."""
    file = folder / "summary.json"
    if not file.exists():
        return ["failed" if cause else "no summary", "", "", ""]
    summary = json.loads(file.read_text(encoding="utf-8"))
    loss, metric = summary["train_loss"], summary["metric"]
    return [
        summary["status"],
        f"{loss['last']:.4f}" if loss else "",
        f"{metric['name']} {metric['value']:.4g}" if metric else "",
        f"{summary['clock_s']:,.1f} s",
    ]


def _is_set(option: str, overrides: Sequence[str]) -> bool:
    return any(each.key_or_group == option for each in parse(overrides))


def unused_folder(folder: Path, chosen: bool) -> Path:
    """Where to write: as ``chosen``, or else a new folder that no other start of this second has.

    Raises ``ConfigError`` where it cannot be made.
    """
    folder = folder.resolve()
    if chosen:
        return folder
    path, number = folder, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = folder.with_name(f"{folder.name}_{number}")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def quieten() -> None:
    """Libraries say nothing of their own, unless the environment wants them to."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})


def check_devices(settings: Settings) -> None:
    """Raise ``ConfigError`` where this machine, on which all apps will run, lacks a device."""
    _ = settings.unit_device, settings.server_device


def start(
    overrides: Sequence[str], settings: Settings | Outline, resume: str | None = None
) -> None:
    """Train, from the checkpoint ``resume`` on if there is one; ``overrides`` give ``settings``
    wherever the apps run. Raises as ``run_job``."""
    if settings.runtime.name == "deployment":
        _run_deployed(overrides, settings, resume)
        return
    assert isinstance(settings, Settings)  # or the server's app would check it
    check_devices(settings)
    if settings.runtime.name == "local":
        _run_local(overrides, settings, resume)
    else:
        _run_simulated(overrides, settings, resume)


def _run_local(overrides: Sequence[str], settings: Settings, resume: str | None) -> None:
    # Imported here: simulations run these rooms in other processes.
    from flwr.app import UserConfig

    from client_app.app import app as client
    from server_app.grid import InlineGrid
    from server_app.training import train

    logging.getLogger("flwr").setLevel(logging.WARNING)
    run_config: UserConfig = {"overrides": shlex.join(overrides)}
    with InlineGrid(client, settings.federation.num_units, run_config) as grid:
        train(grid, config.load(run_config), resume)


def _run_simulated(overrides: Sequence[str], settings: Settings, resume: str | None) -> None:
    """On Flower's simulation engine."""
    from collapipe.cli.simulation import run_simulation
    from collapipe.deployment.app_folder import app_folder
    from collapipe.runs.failure import take_failure
    from collapipe.runs.folder import RunFolder
    from collapipe.runs.rows import check_source, load_server_rows

    run_dir = Path(settings.run_dir)
    # What is wrong with folders and the server's rows is said here, before Flower has started
    # anything.
    with RunFolder(run_dir, resumed=resume is not None).locked():
        check_source(settings)
        if settings.evaluates_on_server:
            load_server_rows(settings)
    with app_folder() as app:
        if not run_simulation(app, overrides, settings.federation.num_units, resume or ""):
            raise take_failure(run_dir, shlex.join(["collapipe", "resume", settings.run_dir]))


def _run_deployed(
    overrides: Sequence[str], settings: Settings | Outline, resume: str | None
) -> None:
    """Submit the run to the server of a deployed federation, and wait for its end."""
    from collapipe.deployment.app_folder import app_folder
    from collapipe.deployment.submitting import submit
    from collapipe.runs.failure import take_failure
    from collapipe.runs.folder import RunFolder

    run_dir, federation = Path(settings.run_dir), str(settings.runtime.federation)
    again = ["collapipe", "resume", str(run_dir), f"runtime.federation={federation}"]
    how = shlex.join(again)
    with RunFolder(run_dir, resumed=resume is not None).locked():
        pass  # whether a run may be written here
    with app_folder() as app:
        if not submit(federation, app, run_dir, overrides, how, resume or ""):
            raise take_failure(run_dir, how)


def _absolute(overrides: Sequence[str], settings: Settings | Outline, folder: Path) -> list[str]:
    """Overrides that mean the same in another working directory, and at another second."""
    tree = settings.tree
    models = {"data.tokenizer": settings.data.tokenizer, "model.name": tree["model"].get("name")}
    named = {
        "hydra.run.dir": folder,
        **{f"data.{option}": path for option, path in settings.data.paths().items()},
        **{option: Path(name) for option, name in models.items() if name and Path(name).is_dir()},
    }
    for group in ("cluster", "channel"):
        if inventory := tree[group].get("file"):
            named[f"{group}.file"] = Path(inventory)
    return [*overrides, *(setting(option, path.resolve()) for option, path in named.items())]
