"""Compute a figure, write it, and report what agrees with the paper."""

import csv
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from collapipe import __version__
from collapipe.errors import ConfigError
from collapipe.process.drawing import own_look
from collapipe.runs.evidence import Interval
from reproduction import (
    fig04,
    fig05,
    fig06,
    fig06_users,
    fig11,
    frameworks,
    remark2,
    spreads,
    table3,
)
from reproduction.drawing import STYLE
from reproduction.fig07_fig08 import FIG07, FIG08
from reproduction.fig09_fig10 import FIG09, FIG10
from reproduction.figure import Claim, PaperFigure
from reproduction.paper_world import paper_presets
from reproduction.training import Training, data_folder

_MODELLED = (
    fig04.FIGURE,
    fig05.FIGURE,
    FIG07,
    FIG08,
    spreads.FIGURE,
    fig11.FIGURE,
    frameworks.FIGURE,
)
_MEASURED = (table3.FIGURE,)
_TRAINED = (fig06.FIGURE, fig06_users.FIGURE, FIG09, FIG10, remark2.FIGURE)
_CHOICES: Mapping[str, Sequence[PaperFigure[Any]]] = {
    **{each.name: (each,) for each in (*_MODELLED, *_MEASURED, *_TRAINED)},
    "modelled": _MODELLED,
    "all": (*_MODELLED, *_MEASURED, *_TRAINED),
}
_DPI = 150


def reproduce(
    choice: str, seeds: int | None, output: Path, data: Path | None = None, full: bool = False
) -> None:
    """Compute and write the chosen figures. Raises ``ConfigError`` for invalid arguments."""
    if choice not in _CHOICES:
        raise ConfigError(f"there is no figure {choice}; known: {', '.join(_CHOICES)}")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    figures, training = _CHOICES[choice], None
    console = Console(highlight=False, markup=False, emoji=False)
    jobs = [job for each in figures if each.jobs for job in each.jobs(0).values()]
    if jobs:
        folder = data_folder(data) if any(job.experiment.data for job in jobs) else None
        runs = (output / "runs").resolve()
        training = Training(folder, runs, full, lambda text: console.print(text, soft_wrap=True))
    _prepare(output)
    for figure in figures:
        begun = time.monotonic()
        with own_look(STYLE):
            claims = _write(figure, range(seeds or figure.num_seeds), training, output)
        console.print(_table(f"{figure.name}, {time.monotonic() - begun:.0f} s", claims))
        console.print(f"{figure.name}: {figure.basis}", soft_wrap=True)
    console.print(f"files: {output}", soft_wrap=True)


def _prepare(output: Path) -> None:
    """Make the output folder. Raises ``ConfigError`` if it cannot be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({error.strerror})") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: nothing may be written there")


def _write(
    figure: PaperFigure[Any], seeds: Sequence[int], training: Training | None, folder: Path
) -> Sequence[Claim]:
    """Write ``NAME.csv``, ``.json``, ``.png`` and ``.svg``; existing ones are replaced."""
    file, evidence = folder / figure.name, figure.evidence(seeds, training)
    record = {
        "figure": figure.name,
        "basis": figure.basis,
        "interval": "95 %, Student's t over the seeds' means; null with one seed",
        "claims": [asdict(claim) for claim in evidence.claims],
        "findings": [asdict(finding) for finding in evidence.findings],
        "provenance": {
            "collapipe": __version__,
            "command": f"python -m reproduction {figure.name} --seeds {len(seeds)}",
            "seeds": list(seeds),
            "settings": dict(evidence.settings),
            "presets": paper_presets().options,
        },
    }
    text = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)
    try:
        with file.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows([figure.columns, *evidence.rows])
        file.with_suffix(".json").write_text(f"{text}\n", encoding="utf-8")
        evidence.picture.savefig(file.with_suffix(".png"), dpi=_DPI)
        evidence.picture.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: {error.filename} cannot be written ({error.strerror})"
        ) from error
    return evidence.claims


def _table(title: str, claims: Iterable[Claim]) -> Table:
    table = Table("claim", "paper", box=SIMPLE_HEAD, title=title)
    table.add_column("ours (95 %)", no_wrap=True)  # a unit stays with its numbers
    table.add_column("agrees")
    for claim in claims:
        paper = claim.paper if isinstance(claim.paper, str) else f"{claim.paper:g} {claim.unit}"
        ours = shown(claim.ours, claim.unit)
        table.add_row(claim.text, paper, ours, "yes" if claim.agrees else "no")
    return table


def shown(interval: Interval, unit: str) -> str:
    """Return such as ``12.3 (11.0 … 13.6) %``; values without unit, as losses, get more digits."""
    digits = 1 if unit else 3
    mean, low, high = (f"{each:z.{digits}f}" for each in (interval.mean, *interval.ends))
    ends = "" if interval.low is None else f" ({low} … {high})"
    return f"{mean}{ends} {unit}".rstrip()
