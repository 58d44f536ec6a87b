"""Commands and exit statuses; what a command does is imported when it is asked for."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import click
import typer

from collapipe import __version__
from collapipe.errors import CollaPipeError, printable
from collapipe.own_packages import find_own_packages_first

_INTERRUPTED = 130
TrustOption = Annotated[
    list[str] | None, typer.Option(help="A package whose plug-ins the run's folder may name.")
]
UnitOption = Annotated[
    int | None, typer.Option(help="Whose model, where the units' models were not averaged.")
]
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command; errors of ours are one line on standard error, and a status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does
    try:
        find_own_packages_first()
        status = app(standalone_mode=False) or 0
    except typer.Exit as error:
        status = error.exit_code
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except CollaPipeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        status = error.exit_status
    except (KeyboardInterrupt, click.Abort):
        status = _INTERRUPTED
    if status == _INTERRUPTED:  # some versions of typer make it of a KeyboardInterrupt themselves
        print("interrupted; what was finished is saved", file=sys.stderr)
    _leave_stuck_threads(status)
    raise SystemExit(status)


def _leave_stuck_threads(status: int) -> None:
    """End the process here if a unit's thread would not: the interpreter's own end tears such
    threads out of torch, which aborts."""
    if any(thread.name.startswith("unit-") for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show debug logs.")] = False,
) -> None:
    """Train Transformers together on clusters of edge devices."""
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s")


@app.command()
def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Options KEY=VALUE, e.g. task=multi30k federation.rounds=5"),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Sweep: KEY=V1,V2 runs each combination.")
    ] = False,
) -> None:
    """Train; without options three clusters learn to translate dates.

    Options are KEY=VALUE, all of them in docs/configuration.md. Groups such as task, strategy,
    cluster and channel take a file's name: collapipe run strategy=random cluster=edge seed=1
    """
    if multirun:
        from collapipe.cli.sweep import run_sweep

        run_sweep(overrides or [])
    else:
        from collapipe.cli.run import run_job

        run_job(overrides or [])


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that wrote a checkpoint.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Options that may change, e.g. federation.rounds=30"),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Name of a folder in checkpoints/; default: the last.")
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Go on with a run that was interrupted, or give one that is complete more rounds."""
    from collapipe.cli.resume import resume_run

    resume_run(run_dir, overrides or [], checkpoint, trust or [])


@app.command()
def predict(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Inputs; without any, lines of standard input.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens that a causal model writes at most; default: 1.")
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Print each answer's probability behind a tab.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per input, with all scores.")
    ] = False,
    trust: TrustOption = None,
    unit: UnitOption = None,
) -> None:
    """Use a run's trained model."""
    from collapipe.cli.predict import as_texts, lines_of, predict_texts

    predict_texts(
        run_dir,
        [as_texts(texts)] if texts else lines_of(sys.stdin.buffer),
        trust or [],
        unit,
        max_new_tokens=max_new_tokens,
        scores=scores,
        as_json=as_json,
    )


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    file: Annotated[
        Path, typer.Option(help="Rows with the columns of the run's own: CSV, TSV, JSON or text.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust: TrustOption = None,
    unit: UnitOption = None,
) -> None:
    """Compute the metric of a run's trained model on other rows."""
    from collapipe.cli.predict import evaluate_file

    evaluate_file(run_dir, file, trust or [], unit, as_json)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run with model=huggingface.")],
    folder: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    trust: TrustOption = None,
    unit: UnitOption = None,
) -> None:
    """Write a run's trained model as a folder that transformers loads."""
    from collapipe.cli.export import export_run

    export_run(run_dir, folder, trust or [], unit)


@app.command()
def plan(
    inventory: Annotated[Path, typer.Argument(help="YAML file that describes your devices.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    solver: Annotated[
        str,
        typer.Option(
            help="exact, paper, gpipe, pipeline, titanic, pipedream, pipeedge, "
            "no_segment_scheduling or vanilla_fl."
        ),
    ] = "exact",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the pipelines as a Gantt chart, .svg or .png.")
    ] = None,
) -> None:
    """Split a model over the devices of an inventory; tell what a batch takes.

    INVENTORY is a YAML file that says what your devices are like and what a block of the model
    costs; docs/examples has two. docs/planning.md explains the file, the answer and the solvers.
    """
    from collapipe.cli.plan.command import run_plan

    run_plan(inventory, as_json, solver, plot)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_DIR…",
            help="Folders of runs; several are compared; default: the latest below ./outputs.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File; default: report.html in the run's folder, or here for several."),
    ] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", help="Round of the Gantt chart; default: the last one planned."),
    ] = None,
) -> None:
    """Write what a run did, or how runs compare, as one HTML file that needs no network."""
    from collapipe.run_report.page import write_report

    write_report(run_dirs or [], output, round_)


@app.command()
def status(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run; default: the latest below ./outputs."),
    ] = None,
) -> None:
    """Tell how far a run is; from another terminal while it is going."""
    from collapipe.cli.status import show_status

    show_status(run_dir)


@app.command()
def reproduce(
    figure: Annotated[str, typer.Argument(help="Such as fig04; or modelled, or all.")],
    seeds: Annotated[
        int | None, typer.Option(help="How many, from 0; default: as docs/reproduction.md has.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the files and runs.")] = Path(
        "outputs/reproduction"
    ),
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with multi30k, chinese_ner and toutiao15; default: $COLLAPIPE_DATA."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train models of the paper's sizes: days.")
    ] = False,
) -> None:
    """Compute figures of the paper; tell where they agree.

    FIGURE is fig04, fig05, fig07, fig08, fig11 or frameworks, together: modelled; fig06, fig09,
    fig10 or remark2, which train, the last without data; or all. What trains goes on where it was
    interrupted: runs in OUTPUT/runs that are finished are not run again. docs/reproduction.md has
    the results.
    """
    from collapipe.reproduction.command import reproduce as compute

    compute(figure, seeds, output, data, full)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


if __name__ == "__main__":
    main()
