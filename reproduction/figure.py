"""A figure of the paper: its computation for a seed, and its findings over all seeds."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from collapipe.runs.evidence import Interval, over_seeds
from reproduction.training import Job, Training

Cell = str | int | float
Row = tuple[Cell, ...]
Ours = Mapping[str, Interval]
"""Our numbers by the text of their findings."""
K = TypeVar("K")
R = TypeVar("R")
PROCESSES = 2  # that compute seeds side by side


@dataclass(frozen=True, slots=True)
class Finding:
    """A number that we computed."""

    text: str
    ours: Interval
    unit: str


@dataclass(frozen=True, slots=True)
class Claim(Finding):
    """A claim of the paper: a number or words, whether our number agrees, and by which rule."""

    paper: float | str
    agrees: bool
    rule: str


def near(text: str, paper: float, ours: Interval, unit: str, most: float | None = None) -> Claim:
    """Return a claim that agrees if our mean differs by at most ``most``.

    The default is a quarter of the paper's number. The interval is ignored, because a wide interval
    would agree with more.
    """
    within, reach = ("a quarter of", abs(paper) / 4) if most is None else (f"{most:g} of", most)
    rule = f"our mean is within {within} the paper's figure"
    return Claim(text, ours, unit, paper, abs(ours.mean - paper) <= reach, rule)


def above(
    text: str, paper: str, ours: Interval, unit: str, limit: float, or_equal: bool = False
) -> Claim:
    """Return a claim that agrees if our whole interval is above ``limit``."""
    (low, _), where = ours.ends, "at least" if or_equal else "above"
    rule = f"our whole 95 % interval is {where} {limit:g} {unit}".rstrip()
    return Claim(text, ours, unit, paper, low > limit or (or_equal and low == limit), rule)


def reduction(
    seeds: Iterable[Mapping[K, R]], of: K, against: K, seconds: Callable[[R], float]
) -> Interval:
    """Return by how many percent one takes less time than another, paired by seed."""
    return over_seeds(100 * (1 - seconds(each[of]) / seconds(each[against])) for each in seeds)


def share_over_seeds(percents: Iterable[float]) -> Interval:
    """Return the interval of a mean percentage, clipped to 0 … 100 %."""
    interval = over_seeds(percents)
    if interval.low is None or interval.high is None:
        return interval
    return Interval(interval.mean, max(0.0, interval.low), min(100.0, interval.high))


@dataclass(frozen=True)
class Evidence:
    """All data of a figure that is written; ``rows`` are a tidy table, one row per point."""

    rows: Sequence[Row]
    claims: Sequence[Claim]
    findings: Sequence[Finding]
    settings: Mapping[str, Cell]
    picture: Figure


@dataclass(frozen=True)
class PaperFigure(Generic[R]):
    """How a figure is computed; R is the result of one seed.

    ``compute`` takes a seed or, for a figure that trains, finished runs by the keys of ``jobs``.
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
    """Call ``compute`` for each seed, in parallel processes that end with this one."""
    if PROCESSES == 1 or len(seeds) == 1:
        return [compute(seed) for seed in seeds]
    ignore_ctrl_c = signal.SIGINT, signal.SIG_IGN  # this process ends the others
    with multiprocessing.get_context("spawn").Pool(PROCESSES, signal.signal, ignore_ctrl_c) as pool:
        return pool.map(compute, seeds, chunksize=1)
