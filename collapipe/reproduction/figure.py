"""A figure of the paper: what a seed computes, and what follows from all seeds."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from collapipe.reproduction.training import Job, Training
from collapipe.runs.evidence import Interval

Cell = str | int | float
Row = tuple[Cell, ...]
Ours = Mapping[str, Interval]
"""Our numbers by the text of their findings."""
R = TypeVar("R")
PROCESSES = 2  # that compute seeds side by side


@dataclass(frozen=True, slots=True)
class Finding:
    """A number of ours."""

    text: str
    ours: Interval
    unit: str


@dataclass(frozen=True, slots=True)
class Claim(Finding):
    """A claim of the paper: its number, or its words where it prints none; whether ours agrees, and
    by which rule."""

    paper: float | str
    agrees: bool
    rule: str


def within_a_quarter(text: str, paper: float, ours: Interval, unit: str) -> Claim:
    """A number agrees by its mean alone: the wider its interval, the more would lie within."""
    agrees = abs(ours.mean - paper) <= abs(paper) / 4
    rule = "our mean is within a quarter of the paper's figure"
    return Claim(text, ours, unit, paper, agrees, rule)


def within_one(text: str, paper: float, ours: Interval, unit: str) -> Claim:
    """A count agrees where our mean is off by at most 1."""
    agrees = abs(ours.mean - paper) <= 1
    return Claim(text, ours, unit, paper, agrees, "our mean is within 1 of the paper's figure")


def at_least(text: str, paper: str, ours: Interval, unit: str, limit: float) -> Claim:
    """A property holds where our whole interval is at ``limit`` or above it."""
    rule = f"our whole 95 % interval is at least {limit:g} {unit}"
    return Claim(text, ours, unit, paper, ours.ends[0] >= limit, rule)


def above(text: str, paper: str, ours: Interval, unit: str, limit: float) -> Claim:
    """A lead holds where our whole interval is above ``limit``, which is more than rounding."""
    rule = f"our whole 95 % interval is above {limit:g} {unit}".rstrip()
    return Claim(text, ours, unit, paper, ours.ends[0] > limit, rule)


@dataclass(frozen=True)
class Evidence:
    """All that is written down for a figure; ``rows`` are a tidy table, one row per point."""

    rows: Sequence[Row]
    claims: Sequence[Claim]
    findings: Sequence[Finding]
    settings: Mapping[str, Cell]
    picture: Figure


@dataclass(frozen=True)
class PaperFigure(Generic[R]):
    """How a figure is computed, R being the result of one seed.

    ``compute`` takes a seed; of a figure that trains: the finished runs by the keys of ``jobs``.
    """

    name: str
    columns: tuple[str, ...]  # of ``rows``
    compute: Callable[..., R]
    rows: Callable[[int, R], Iterable[Row]]  # of a seed
    findings: Callable[[Sequence[R]], Iterable[Finding]]  # the paper's claims, too
    draw: Callable[[Sequence[R], Ours], Figure]
    settings: Mapping[str, Cell] = field(default_factory=dict)  # next to the presets
    num_seeds: int = 5
    jobs: Callable[[int], Mapping[Any, Job]] | None = None  # of a seed; None: nothing is trained
    basis: str = "times that a model predicts, not measured ones"

    def evidence(self, seeds: Sequence[int], training: Training | None = None) -> Evidence:
        """Compute or train all seeds. Raises ``ConfigError`` and ``RoundFailedError``."""
        settings = dict(self.settings)
        if self.jobs is None:
            results = compute_seeds(self.compute, seeds)
        else:
            assert training is not None
            jobs = [self.jobs(seed) for seed in seeds]
            runs = training.runs([job for each in jobs for job in each.values()])
            results = [self.compute({key: runs[each[key]] for key in each}) for each in jobs]
            wall_s = round(sum(run.summary.wall_s or 0 for run in runs.values() if run.summary))
            settings |= {"sizes": training.sizes, "runs": len(runs), "runs_wall_s": wall_s}
        found = list(self.findings(results))
        return Evidence(
            [row for each in zip(seeds, results, strict=True) for row in self.rows(*each)],
            [each for each in found if isinstance(each, Claim)],
            [each for each in found if not isinstance(each, Claim)],
            settings,
            self.draw(results, {each.text: each.ours for each in found}),
        )


def compute_seeds(compute: Callable[[int], R], seeds: Sequence[int]) -> list[R]:
    """``compute`` of each seed, side by side in processes that end with this one."""
    if PROCESSES == 1 or len(seeds) == 1:
        return [compute(seed) for seed in seeds]
    ignore_ctrl_c = signal.SIGINT, signal.SIG_IGN  # this process ends the others
    with multiprocessing.get_context("spawn").Pool(PROCESSES, signal.signal, ignore_ctrl_c) as pool:
        return pool.map(compute, seeds, chunksize=1)
