"""``collapipe reproduce``: compute a figure, write it down, and say what agrees with the paper."""

import csv
import json
import os
import pkgutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from collapipe import __version__
from collapipe.errors import ConfigError
from collapipe.reproduction.drawing import style
from collapipe.reproduction.figure import Claim, Evidence, PaperFigure
from collapipe.reproduction.paper_world import paper_presets
from collapipe.reproduction.training import Training, data_folder
from collapipe.runs.evidence import Interval

_FIGURES = MappingProxyType(
    {
        "fig04": "fig04:FIGURE",
        "fig05": "fig05:FIGURE",
        "fig06": "fig06:FIGURE",
        "fig07": "fig07_fig08:FIG07",
        "fig08": "fig07_fig08:FIG08",
        "fig09": "fig09_fig10:FIG09",
        "fig10": "fig09_fig10:FIG10",
        "fig11": "fig11:FIGURE",
        "frameworks": "frameworks:FIGURE",
        "remark2": "remark2:FIGURE",
    }
)
"""Where each figure is defined; imported when it is asked for."""
_FROM_DATA = ("fig06", "fig09", "fig10")
_TRAINED = (*_FROM_DATA, "remark2")
_MODELLED = tuple(name for name in _FIGURES if name not in _TRAINED)
_GROUPS = MappingProxyType({"modelled": _MODELLED, "all": (*_MODELLED, *_TRAINED)})
_DPI = 150


def reproduce(
    figure: str, seeds: int | None, output: Path, data: Path | None = None, full: bool = False
) -> None:
    """Write one figure, those that need no training, or all of them, to ``output``.

    Parameters
    ----------
    seeds
        How many; None: as many as docs/reproduction.md has.
    data
        Folder of the data sets, for figures that train on some; None: $COLLAPIPE_DATA.
    full
        Train models of the paper's sizes.

    Raises
    ------
    ConfigError
        For an unknown figure, no seeds, no data where they are needed, or a folder that cannot be
        written to.
    """
    if figure not in (*_FIGURES, *_GROUPS):
        known = ", ".join((*_FIGURES, *_GROUPS))
        raise ConfigError(f"there is no figure {figure}; known: {known}")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    names, training = _GROUPS.get(figure, (figure,)), None
    console = Console(highlight=False, markup=False, emoji=False)
    if any(name in _TRAINED for name in names):
        folder = data_folder(data) if any(name in _FROM_DATA for name in names) else None
        runs = (output / "runs").resolve()
        training = Training(folder, runs, full, lambda text: console.print(text, soft_wrap=True))
    _prepare(output)
    for name in names:
        begun = time.monotonic()
        chosen: PaperFigure[Any] = pkgutil.resolve_name(f"collapipe.reproduction.{_FIGURES[name]}")
        numbers = range(seeds or chosen.num_seeds)
        with style():
            evidence = chosen.evidence(numbers, training)
            _write(chosen, evidence, numbers, output)
        title = f"{name}, {time.monotonic() - begun:.0f} s"
        console.print(_table(title, evidence.claims))
    console.print(f"modelled times, not measured ones; files: {output}", soft_wrap=True)


def _prepare(output: Path) -> None:
    """Refuse a folder that nothing can be written to, before anything is computed."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({error.strerror})") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: nothing may be written there")


def _write(
    figure: PaperFigure[Any], evidence: Evidence, seeds: Sequence[int], folder: Path
) -> None:
    """Write ``NAME.csv``, ``.json``, ``.png`` and ``.svg``; existing ones are replaced."""
    file, record = folder / figure.name, _record(figure, evidence, seeds)
    try:
        with file.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(figure.columns)
            table.writerows(evidence.rows)
        text = json.dumps(record, indent=2, allow_nan=False, ensure_ascii=False)
        file.with_suffix(".json").write_text(f"{text}\n", encoding="utf-8")
        evidence.picture.savefig(file.with_suffix(".png"), dpi=_DPI)
        evidence.picture.savefig(file.with_suffix(".svg"), metadata={"Date": None})
    except OSError as error:
        raise ConfigError(
            f"--output {folder}: {error.filename} cannot be written ({error.strerror})"
        ) from error


def _record(
    figure: PaperFigure[Any], evidence: Evidence, seeds: Sequence[int]
) -> dict[str, object]:
    return {
        "figure": figure.name,
        "basis": figure.basis,
        "interval": "95 %, Student's t over the seeds' means; null with one seed",
        "claims": [asdict(claim) for claim in evidence.claims],
        "findings": [asdict(finding) for finding in evidence.findings],
        "provenance": {
            "collapipe": __version__,
            "command": f"collapipe reproduce {figure.name} --seeds {len(seeds)}",
            "seeds": list(seeds),
            "settings": dict(evidence.settings),
            "presets": paper_presets().options,
        },
    }


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
    """Such as ``12.3 (11.0 … 13.6) %``; what has no unit, such as a loss, more precisely."""
    digits = 1 if unit else 3
    mean, low, high = (
        "" if each is None else f"{each:.{digits}f}"
        for each in (interval.mean, interval.low, interval.high)
    )
    return " ".join([mean, *([f"({low} … {high})"] if low else []), *([unit] if unit else [])])
