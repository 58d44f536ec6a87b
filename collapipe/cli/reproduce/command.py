"""``collapipe reproduce``: compute a figure, write it down, and say what agrees with the paper."""

import importlib
import os
from collections.abc import Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from collapipe.cli.reproduce.drawing import style
from collapipe.cli.reproduce.evidence import Claim, Evidence, Interval
from collapipe.cli.reproduce.writing import write
from collapipe.errors import ConfigError

FIGURES = ("fig04", "fig05", "fig07", "fig08", "fig11")
_ALL = "all"


def reproduce(figure: str, seeds: int, output: Path) -> None:
    """Write one figure, or all of them, to ``output``.

    Raises ``ConfigError`` for an unknown figure, no seeds, or a folder that cannot be written to.
    """
    if figure not in (*FIGURES, _ALL):
        raise ConfigError(f"there is no figure {figure}; known: {', '.join((*FIGURES, _ALL))}")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    _prepare(output)
    console = Console(highlight=False, markup=False, emoji=False)
    for name in FIGURES if figure == _ALL else (figure,):
        with style():
            evidence = _compute(name, range(seeds))
            write(name, evidence, range(seeds), output)
        console.print(_table(name, evidence.claims))
    console.print(f"modelled times, not measured ones; files: {output}", soft_wrap=True)


def _prepare(output: Path) -> None:
    """Before anything is computed."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({error.strerror})") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: nothing may be written there")


def _compute(name: str, seeds: Iterable[int]) -> Evidence:
    module = importlib.import_module(f"collapipe.cli.reproduce.{name}")
    evidence: Evidence = module.evidence(tuple(seeds))
    return evidence


def _table(name: str, claims: Iterable[Claim]) -> Table:
    table = Table("claim", "paper", box=SIMPLE_HEAD, title=name)
    table.add_column("ours (95 %)", no_wrap=True)  # a unit stays with its figures
    table.add_column("agrees")
    for claim in claims:
        paper = claim.paper if isinstance(claim.paper, str) else f"{claim.paper:g} {claim.unit}"
        table.add_row(
            claim.text, paper, f"{shown(claim.ours)} {claim.unit}", "yes" if claim.agrees else "no"
        )
    return table


def shown(interval: Interval) -> str:
    """Such as ``12.3 (11.0 … 13.6)``."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.1f}"
    return f"{interval.mean:.1f} ({interval.low:.1f} … {interval.high:.1f})"
