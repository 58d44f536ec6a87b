"""All commands; a command's code is imported when the command runs."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import typer
from typer import Argument, Option

from collapipe import __version__
from collapipe.cli import credentials
from collapipe.cli.deploy import command as deploy
from collapipe.cli.device import command as device
from collapipe.cli.exit_status import INTERRUPTED, Reported, status_of
from collapipe.cli.interrupts import sure_interrupts
from collapipe.cli.options import Json, Overrides, RunDir, Trust, picture
from collapipe.cli.trained import command as trained
from collapipe.own_packages import NAMES, find_own_packages_first
from collapipe.process.allocator import share_heap
from collapipe.process.children import end_with_parent
from collapipe.process.folders import with_home
from collapipe.process.streams import complain, open_streams, write_rest

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests
)
app.add_typer(credentials.app, name="credentials")
app.add_typer(device.app, name="device")
app.add_typer(deploy.app, name="deploy")


def child_command(*arguments: str) -> Sequence[str]:
    """Return the command of ``collapipe ARGUMENTS`` as a child that ends with this process.

    Python's option ``-P`` keeps it from importing files of the current folder as modules.
    """
    return [sys.executable, "-P", "-m", "collapipe.cli.app", str(os.getpid()), *arguments]


def main() -> None:
    """Run the command; an error is one line on standard error and an exit status."""
    share_heap()
    open_streams()
    os.environ["MPLBACKEND"] = "agg"  # a backend of a notebook or desktop may not be installed
    with sure_interrupts():
        status = status_of(_run)
    # some versions of typer convert KeyboardInterrupt themselves
    if status == INTERRUPTED and not isinstance(status, Reported):
        complain("interrupted")
    status = write_rest(status)
    _leave_stuck_threads(status)
    raise SystemExit(status)


def _run() -> int:
    Path.cwd()  # without a current folder torch would end the process
    find_own_packages_first()
    return app(with_home(sys.argv[1:]), standalone_mode=False) or 0


def _leave_stuck_threads(status: int) -> None:
    """End the process at once if a unit's thread still runs: a normal exit would abort in torch."""
    if any(thread.name.startswith("unit-") for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(status)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    verbose: Annotated[
        bool, Option("-v", "--verbose", help="Show logs: pipelines' seconds, every round.")
    ] = False,
    version: Annotated[
        bool,
        Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Train Transformers together on clusters of edge devices."""
    logging.basicConfig(format="%(name)s: %(message)s")
    for name in ("collapipe", *NAMES) if verbose else ():  # not for libraries
        logging.getLogger(name).setLevel(logging.DEBUG)
    context.obj = child_command()  # for commands that start others, which this module imports


@app.command()
def run(
    overrides: Overrides = None,
    config: Annotated[Path | None, Option(help="Options as YAML, or a run's config.yaml.")] = None,
    multirun: Annotated[
        bool, Option("-m", "--multirun", help="KEY=V1,V2 runs every combination.")
    ] = False,
) -> None:
    """Train; without options three clusters learn to translate dates.

    Options are KEY=VALUE and override those of --config; docs/reference/options.md lists them.
    Groups such as task, strategy, cluster and channel take a file's name: collapipe run
    strategy=random cluster=edge seed=1
    """
    from collapipe.cli.run import run_job, run_sweep

    (run_sweep if multirun else run_job)(overrides or [], config)


@app.command()
def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, Option(help="Its name; default: the last.")] = None,
    trust: Trust = None,
) -> None:
    """Continue a run that was interrupted, or add rounds to a complete one.

    Some options may change: collapipe resume RUN_DIR federation.rounds=30
    """
    from collapipe.cli.resume import resume_run

    resume_run(run_dir, overrides or [], checkpoint, trust or [])


for command in (trained.predict, trained.evaluate, trained.audit, trained.export):
    app.command()(command)


@app.command()
def plan(
    inventory: Annotated[Path, Argument(help="YAML file that describes your devices.")],
    as_json: Json = False,
    solver: Annotated[
        str,
        Option(
            help="exact, shared, paper, gpipe, pipeline, titanic, pipedream, pipeedge, "
            "asteroid, adaptis, no_segment_scheduling or vanilla_fl."
        ),
    ] = "exact",
    plot: Annotated[
        Path | None, Option(help="Gantt chart to write, .svg or .png.", callback=picture)
    ] = None,
) -> None:
    """Split a model over the devices of an inventory, and compute a batch's time.

    INVENTORY is a YAML file that describes your devices and the cost of a block of the model;
    docs/examples has some. docs/reference/inventory.md lists its keys.
    """
    from collapipe.cli.plan.command import run_plan

    run_plan(inventory, as_json, solver, plot)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN_DIR…",
            help="Folders of runs; several are compared; default: the latest below ./outputs.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="File; default: report.html in the run's folder, or here for several."),
    ] = None,
    round_: Annotated[
        int | None, Option("--round", help="Round of the Gantt chart; default: the last.")
    ] = None,
) -> None:
    """Write a report on a run, or a comparison of runs, as one HTML file that needs no network."""
    from collapipe.run_report.page import write_report

    write_report(run_dirs or [], output, round_)


@app.command()
def status(
    run_dir: Annotated[Path | None, Argument(help="Folder of a run; default: the latest.")] = None,
    deployment: Annotated[
        Path | None, Option(metavar="DIR", help="Folder of a federation's server instead.")
    ] = None,
) -> None:
    """Show a run's progress, also from another terminal during the run.

    With --deployment, on the server's machine: show the units of a deployed federation and the
    progress of its current runs.
    """
    from collapipe.cli.status import show_deployment, show_status

    if deployment is None:
        show_status(run_dir)
    elif run_dir is None:
        show_deployment(deployment)
    else:
        raise click.UsageError("RUN_DIR and --deployment DIR: give one of them")


@app.command()
def trace(
    run_dir: Annotated[Path | None, Argument(help="Folder of a run; default: the latest.")] = None,
    round_: Annotated[int | None, Option("--round", help="Default: the last.")] = None,
    output: Annotated[
        Path | None, Option(help="File; default: trace-ROUND.json in the run's folder.")
    ] = None,
    plot: Annotated[
        Path | None, Option(help="Picture of a step instead, .svg or .png.", callback=picture)
    ] = None,
) -> None:
    """Write a timeline of the real devices in a round, for https://ui.perfetto.dev."""
    from collapipe.run_report.trace import draw, read_trace, write_trace
    from collapipe.runs.reading import latest_run

    if plot and output:
        raise click.UsageError("--output FILE and --plot FILE: give one of them")
    run_dir = run_dir or latest_run()
    trace = read_trace(run_dir, round_)
    file = plot or output or run_dir / f"trace-{trace.round}.json"
    if plot is None:
        write_trace(trace, file)
    else:
        draw(trace, file)
    agree = f"clocks of devices agree within {1e3 * trace.error_s:.3g} ms"
    print(f"round {trace.round}: {file}; {agree}")


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def up(
    context: typer.Context,
    devices: Annotated[int, Option(min=1, help="Daemons of each cluster.")] = 3,
    clusters: Annotated[int, Option(min=1, help="Clusters.")] = 1,
    inventory: Annotated[Path | None, Option(help="File to write; default: temporary.")] = None,
    memory: Annotated[str, Option(help="Of each device; or of each, with commas.")] = "1GB",
) -> None:
    """Start devices on this machine, and remove them at the end: collapipe up --devices 3 -- run"""
    from collapipe.cli.up import up as start

    if context.args[:1] not in ([], ["run"], ["resume"]):
        way = "for another command start devices alone, with --inventory"
        raise click.UsageError(f"{context.args[0]}: up trains by `run` or `resume` alone; {way}")
    raise typer.Exit(start(devices, clusters, inventory, memory, context.args, context.obj))


@app.command()
def unit(
    file: Annotated[Path, Argument(help="The owner's file: rows, devices, the server.")],
    metrics_port: Annotated[
        int | None, Option(min=1, max=65535, help="For Prometheus, on this machine only.")
    ] = None,
) -> None:
    """Take part in a deployed federation with the owner's rows, until Ctrl-C or SIGTERM."""
    from collapipe.cli.unit import run_unit

    run_unit(file, metrics_port)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


if __name__ == "__main__":  # the command of ``child_command``
    share_heap()  # before the process has threads
    end_with_parent(int(sys.argv.pop(1)))
    main()
