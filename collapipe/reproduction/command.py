"""``collapipe reproduce``: compute a figure, write it down, and say what agrees with the paper."""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from collapipe.errors import ConfigError
from collapipe.reproduction.drawing import style
from collapipe.reproduction.training import Training, data_folder
from collapipe.reproduction.writing import write
from collapipe.runs.evidence import Claim, Evidence, Interval

MODELLED = ("fig04", "fig05", "fig07", "fig08", "fig11", "frameworks")
FROM_DATA = ("fig06", "fig09", "fig10")
TRAINED = (*FROM_DATA, "remark2")
_SEEDS = MappingProxyType(
    {
        **dict.fromkeys(MODELLED, 5),
        "fig11": 8,
        "frameworks": 20,
        **dict.fromkeys(TRAINED, 3),
    }
)
_GROUPS = MappingProxyType({"modelled": MODELLED, "all": (*MODELLED, *TRAINED)})


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
    if figure not in (*_SEEDS, *_GROUPS):
        known = ", ".join((*sorted(_SEEDS), *_GROUPS))
        raise ConfigError(f"there is no figure {figure}; known: {known}")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds {seeds}: must be at least 1")
    names, training = _GROUPS.get(figure, (figure,)), None
    console = Console(highlight=False, markup=False, emoji=False)
    if any(name in TRAINED for name in names):
        folder = data_folder(data) if any(name in FROM_DATA for name in names) else None
        training = Training(folder, (output / "runs").resolve(), full, _said(console))
    _prepare(output)
    for name in names:
        begun, drawn = time.monotonic(), range(seeds or _SEEDS[name])
        with style():
            evidence = _compute(name, drawn, training)
            write(name, evidence, drawn, output)
        title = f"{name}, {time.monotonic() - begun:.0f} s"
        console.print(_table(title, evidence.claims))
    console.print(f"modelled times, not measured ones; files: {output}", soft_wrap=True)


def _said(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True)


def _prepare(output: Path) -> None:
    """Before anything is computed."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be made ({error.strerror})") from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: nothing may be written there")


def _compute(name: str, seeds: Sequence[int], training: Training | None) -> Evidence:
    module = importlib.import_module(f"collapipe.reproduction.{name}")
    needed = (training,) if name in TRAINED else ()
    evidence: Evidence = module.evidence(tuple(seeds), *needed)
    return evidence


def _table(title: str, claims: Iterable[Claim]) -> Table:
    table = Table("claim", "paper", box=SIMPLE_HEAD, title=title)
    table.add_column("ours (95 %)", no_wrap=True)  # a unit stays with its figures
    table.add_column("agrees")
    for claim in claims:
        paper = claim.paper if isinstance(claim.paper, str) else f"{claim.paper:g} {claim.unit}"
        table.add_row(
            claim.text, paper, shown(claim.ours, claim.unit), "yes" if claim.agrees else "no"
        )
    return table


def shown(interval: Interval, unit: str) -> str:
    """Such as ``12.3 (11.0 … 13.6) %``; what has no unit, such as a loss, more precisely."""
    digits = 1 if unit else 3
    mean, low, high = (
        "" if each is None else f"{each:.{digits}f}"
        for each in (interval.mean, interval.low, interval.high)
    )
    return " ".join([mean, *([f"({low} … {high})"] if low else []), *([unit] if unit else [])])
