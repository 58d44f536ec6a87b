"""``collapipe run``: run one job or a sweep, here, on Flower's simulation engine, or deployed."""

import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from collapipe import config
from collapipe.config import Settings
from collapipe.config.composing import FOLDERS_OR_NAMES, PATHS, sweep_dir
from collapipe.config.overrides import expand, parse, setting
from collapipe.config.resolved import value_at
from collapipe.deployment.server_folder import with_folder
from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError, printable
from collapipe.formatting import counted, print_table
from collapipe.own_packages import error_of_plugin, find_own_packages_first
from collapipe.runs.folder import holds_run, locked
from collapipe.runs.reading import read_run

_QUIET = {
    "GRPC_VERBOSITY": "NONE",  # important problems are raised as errors
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_NOT_BEGUN = ["not begun", "", "", ""]  # a job's row in a sweep's table


def run_job(overrides: Sequence[str] = (), config_file: Path | None = None) -> Path:
    """Train once, as ``collapipe run`` does, and return the run's folder.

    ``overrides`` are options, such as ``"federation.rounds=3"``. They take precedence over those in
    ``config_file``, which is YAML or a run's ``config.yaml``.

    Raises ``CollaPipeError`` or ``KeyboardInterrupt``.
    """
    if _is_set("hydra.sweep.dir", overrides):
        raise ConfigError("hydra.sweep.dir: has no effect without -m; set hydra.run.dir")
    find_own_packages_first()
    quieten()
    overrides = with_folder(config.own_overrides(overrides, config_file))
    settings = config.outline(overrides)
    if not _checked_on_the_server(settings) and _leaves_evaluation(config.complete(settings)):
        overrides = [*overrides, "evaluation.where=units"]
        settings = config.load_overrides(overrides)
    chosen = _is_set("hydra.run.dir", overrides)
    folder = unused_folder(Path(settings.run_dir), chosen)
    try:
        start(config.outline(absolute(overrides, settings, folder)))
    except CollaPipeError:
        if not chosen and not any(folder.iterdir()):  # nothing was written
            folder.rmdir()
        raise
    return folder


def _checked_on_the_server(settings: Settings) -> bool:
    """Whether the server's app, on this machine, will do the checks that an outline omits. It does
    so before it contacts any unit, and submitting the run takes a tenth of the time."""
    federation = settings.runtime.federation
    deployed = settings.runtime.name == "deployment" and Path(str(federation)).is_dir()
    return deployed and settings.data.name is None


def _leaves_evaluation(settings: Settings) -> bool:
    """Whether ``evaluation.where=auto`` means ``units`` because of a hub data set's splits."""
    automatic = settings.tree["evaluation"]["where"] == "auto" and settings.evaluates_on_server
    if not automatic or settings.data.name is None:
        return False
    from collapipe.runs.rows import draws_held_out  # takes seconds

    return draws_held_out(settings)


def run_sweep(overrides: Sequence[str], config_file: Path | None = None) -> None:
    """Train each combination in a numbered folder, then print a table of all jobs.

    Errors in the options of any job are raised before the first one trains. A job that fails later
    does not stop the others; ``RoundFailedError`` is then raised at the end.
    """
    where = Path(sweep_dir(overrides))
    given = expand([each for each in overrides if not _is_set("hydra.sweep.dir", [each])])
    jobs = [config.own_overrides(job, config_file) for job in given]
    known = list[Mapping[str, object]]()
    for number, job in enumerate(jobs):
        settings = config.load_overrides(with_folder([*job, setting("hydra.run.dir", where / "0")]))
        if settings.tree in known:
            chosen = shlex.join(each for each in given[number] if each not in overrides)
            both = f"jobs {known.index(settings.tree)} and {number} are the same run"
            raise ConfigError(f"{both}, {chosen}; remove one of the two values")
        known.append(settings.tree)
        if settings.runtime.name != "deployment":
            check_devices(settings)
    folder = unused_folder(where, chosen=_is_set("hydra.sweep.dir", overrides))
    with locked(folder):
        _run_all(jobs, given, folder)


def _run_all(jobs: Sequence[Sequence[str]], given: Sequence[Sequence[str]], folder: Path) -> None:
    """Train the ``jobs`` in numbered folders of ``folder``, and name them by what was ``given``.

    Raises ``ConfigError`` if the folder holds runs, and ``RoundFailedError`` if a job fails.
    """
    folders = [folder / str(number) for number in range(len(jobs))]
    numbered = (each for each in folder.glob("*") if each.name.isdecimal())
    if used := sorted(filter(holds_run, numbered), key=lambda each: int(each.name)):
        way = "choose another folder"
        if unended := [each for each in used if not (each / "summary.json").exists()]:
            way += f", or continue the run: collapipe resume {shlex.quote(str(unended[0]))}"
        runs = counted(len(used), "run")
        raise ConfigError(f"hydra.sweep.dir={folder}: holds {runs} already; {way}")
    names = [
        shlex.join([each for each in job if any(each not in other for other in given)])
        for job in given
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
    """Run a job; return and print why it failed, or return None."""
    try:
        run_job(overrides)
    except CollaPipeError as error:
        cause = printable(str(error))
        print(f"error: {cause}", file=sys.stderr)
        return cause
    except Exception as error:  # a user's class may raise anything; the other jobs continue
        if plugin_error := error_of_plugin(error):
            print(f"error: {plugin_error}", file=sys.stderr)
            return plugin_error
        traceback.print_exc()
        return f"{type(error).__name__}: {printable(str(error))}"
    return None


def _print_table(
    names: Sequence[str], folders: Sequence[Path], causes: Sequence[str | None]
) -> None:
    """Print a row for each job, and the command that compares jobs with metrics."""
    begun = dict(zip(folders, [*causes, None], strict=False))  # the last job may be interrupted
    rows = [
        [str(n), names[n], *(_results(each, begun[each]) if each in begun else _NOT_BEGUN)]
        for n, each in enumerate(folders)
    ]
    print_table(Console(), ["job", "options", "status", "train loss", "test", "clock"], rows)
    ended = [each for each, cause in begun.items() if cause is None]
    compared = [str(each) for each in ended if (each / "metrics.jsonl").exists()]
    if compared:
        print(f"report: {shlex.join(['collapipe', 'report', *compared])}")


def _results(folder: Path, cause: str | None) -> list[str]:
    """Return status, last training loss, test metric and clock of a job that has begun."""
    if cause is not None:
        return ["failed", "", "", ""]  # a refused job's folder may have another run's figures
    file = folder / "summary.json"
    if not file.exists():
        return ["no summary", "", "", ""] if folder.exists() else _NOT_BEGUN
    summary = json.loads(file.read_text(encoding="utf-8"))
    loss, metric = summary["train_loss"], summary["metric"]
    clock = f"{summary['clock_s']:,.1f} s", read_run(folder).missing_in_clock
    return [
        summary["status"],
        f"{loss['last']:.4f}" if loss else "",
        f"{metric['name']} {metric['value']:.4g}" if metric else "",
        ", ".join(filter(None, clock)),
    ]


def _is_set(option: str, overrides: Sequence[str]) -> bool:
    return any(each.key_or_group == option for each in parse(overrides))


def unused_folder(folder: Path, chosen: bool) -> Path:
    """Return ``folder`` if the user has ``chosen`` it, else make a new folder with a free name.

    Another start in the same second may have taken the name. Raises ``ConfigError`` if the folder
    cannot be made.
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
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}); choose another with hydra.run.dir, "
                "or with hydra.sweep.dir and -m"
            ) from error


def quieten() -> None:
    """Silence libraries, unless environment variables say otherwise."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def check_devices(settings: Settings) -> None:
    """Raise ``ConfigError`` if this machine, on which all apps will run, lacks a torch device."""
    _ = settings.unit_device, settings.server_device


def start(settings: Settings, resume: str | None = None) -> None:
    """Train, from the checkpoint ``resume`` if given.

    Paths in ``settings`` must be absolute. Raises as ``run_job``.
    """
    if settings.runtime.name == "deployment":
        _run_deployed(settings, resume)
        return
    config.load_text.cache_clear()  # rows may have changed since this process's last run
    settings = config.complete(settings)
    check_devices(settings)
    if settings.runtime.name == "local":
        _run_local(settings, resume)
    else:
        _run_simulated(settings, resume)


def _run_local(settings: Settings, resume: str | None) -> None:
    # Imported here, because simulations run these apps in other processes.
    from client_app.app import app as client
    from collapipe.flower.inline_grid import InlineGrid
    from collapipe.inventory.cluster import DeviceCluster
    from collapipe.process.torch_device import torch_for_a_run
    from server_app.training import train

    logging.getLogger("flwr").setLevel(logging.WARNING)
    # Real devices compute elsewhere; units that share a head should take steps in parallel.
    real = isinstance(settings.build("cluster"), DeviceCluster)
    cores = None if real or settings.decoder.mode == "shared" else os.cpu_count()
    with torch_for_a_run(), InlineGrid(client, settings.federation.num_units, cores) as grid:
        train(grid, settings, resume)


def _run_simulated(settings: Settings, resume: str | None) -> None:
    from collapipe.cli.simulation import run_simulation
    from collapipe.flower.commands import app_folder
    from collapipe.runs.confirmation import resume_command
    from collapipe.runs.failure import take_failure
    from collapipe.runs.folder import RunFolder
    from collapipe.runs.reading import how_to_go_on
    from collapipe.runs.rows import check_source, load_server_rows

    run_dir = Path(settings.run_dir)
    # Raise errors in folders and the server's rows here, before Flower starts anything.
    with RunFolder(run_dir, resumed=resume is not None).locked():
        check_source(settings)
        if settings.evaluates_on_server:
            load_server_rows(settings)
    with app_folder() as app:
        try:
            succeeded = run_simulation(app, settings, resume)
        except KeyboardInterrupt:
            print(how_to_go_on(run_dir, resume_command(settings)), flush=True)
            raise
        if not succeeded:
            raise take_failure(run_dir, resume_command(settings))


def _run_deployed(settings: Settings, resume: str | None) -> None:
    """Submit the run to the server of a deployed federation, and wait for its end."""
    from collapipe.deployment.submitting import submit
    from collapipe.flower.commands import app_folder
    from collapipe.runs.confirmation import resume_command
    from collapipe.runs.failure import take_failure
    from collapipe.runs.folder import RunFolder

    run_dir, how = Path(settings.run_dir), resume_command(settings)
    with RunFolder(run_dir, resumed=resume is not None).locked():
        pass  # only checks that a run may be written here
    with app_folder() as app:
        if not submit(app, settings, how, resume):
            raise take_failure(run_dir, how)


def absolute(overrides: Sequence[str], settings: Settings, folder: Path) -> list[str]:
    """Return overrides that mean the same in another working directory and at another time."""
    given = {option: value_at(settings.tree, option) for option in (*PATHS, *FOLDERS_OR_NAMES)}
    named = {option: Path(str(each)) for option, each in given.items() if each}
    paths = {option: path for option, path in named.items() if option in PATHS or path.is_dir()}
    paths["hydra.run.dir"] = folder
    return [*overrides, *(setting(option, path.resolve()) for option, path in paths.items())]
