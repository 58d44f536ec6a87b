"""``collapipe run -m``: every combination of the options' values, one run after the other."""

import json
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from collapipe import config
from collapipe.cli.run import run_job, unused_folder
from collapipe.config import quoted
from collapipe.config.composing import sweep_dir
from collapipe.config.overrides import expand, join, parse
from collapipe.errors import CollaPipeError, RoundFailedError, printable
from collapipe.formatting import print_table


def run_sweep(overrides: Sequence[str], config_file: Path | None = None) -> None:
    """Train each combination in a numbered folder, then print a table of all.

    Whatever is wrong with the options of any job is raised before the first one trains; a job that
    fails later does not stop the others. Raises ``RoundFailedError`` in the end where one did.
    """
    jobs = [config.own_overrides(job, config_file) for job in expand(overrides)]
    where = Path(sweep_dir(overrides))
    for job in jobs:
        config.load_overrides([*job, f"hydra.run.dir={quoted(where / '0')}"])
    folder = unused_folder(where, chosen=_is_chosen("hydra.sweep.dir", overrides))
    folders = [folder / str(number) for number in range(len(jobs))]
    names = [
        join([each for each in job if any(each not in other for other in jobs)]) for job in jobs
    ]
    causes: list[str | None] = []
    try:
        for number, (job, run_dir) in enumerate(zip(jobs, folders, strict=True)):
            print(f"job {number} of 0 … {len(jobs) - 1}: {names[number]}")
            causes.append(_cause(run_job, [*job, f"hydra.run.dir={quoted(run_dir)}"]))
    finally:
        _print_table(names, folders, causes)
    failed = [number for number, cause in enumerate(causes) if cause is not None]
    if failed:
        raise RoundFailedError(
            f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(map(str, failed))}"
        )


def _cause(train: Callable[[Sequence[str]], object], overrides: Sequence[str]) -> str | None:
    """Why a job failed, printed at once; None where it did not."""
    try:
        train(overrides)
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


def _is_chosen(option: str, overrides: Sequence[str]) -> bool:
    return any(each.key_or_group == option for each in parse(overrides))
