"""What a figure shows: points, figures with intervals over seeds, and the paper's claims."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from scipy.special import stdtrit

CONFIDENCE = 0.95
Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its 95 % interval by Student's t; None where there is one seed."""

    mean: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """``low`` and ``high``; without an interval the mean itself."""
        if self.low is None or self.high is None:
            return self.mean, self.mean
        return self.low, self.high


def over_seeds(values: Sequence[float]) -> Interval:
    """The interval of the mean of one value per seed."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    half = quantile * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def share_over_seeds(percents: Sequence[float]) -> Interval:
    """The same of shares, none of which is below 0 or above 100 %."""
    interval = over_seeds(percents)
    if interval.low is None or interval.high is None:
        return interval
    return Interval(interval.mean, max(0.0, interval.low), min(100.0, interval.high))


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure of ours that the paper prints no counterpart of."""

    text: str
    ours: Interval
    unit: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says, what we found, and whether that agrees.

    Attributes
    ----------
    paper
        Its figure, or its words where it prints none.
    rule
        By which ``agrees`` was decided.
    """

    text: str
    paper: float | str
    ours: Interval
    unit: str
    agrees: bool
    rule: str


def within_a_quarter(text: str, paper: float, ours: Interval, unit: str) -> Claim:
    """The claim of a number: our mean is off by at most a quarter of it.

    Not the interval's matter: the wider it is, the more it would agree with.
    """
    agrees = abs(ours.mean - paper) <= abs(paper) / 4
    return Claim(
        text, paper, ours, unit, agrees, "our mean is within a quarter of the paper's figure"
    )


def within_one(text: str, paper: float, ours: Interval, unit: str) -> Claim:
    """The claim of a count: our mean is off by at most 1."""
    agrees = abs(ours.mean - paper) <= 1
    return Claim(text, paper, ours, unit, agrees, "our mean is within 1 of the paper's figure")


def at_least(text: str, paper: str, ours: Interval, unit: str, limit: float) -> Claim:
    """The claim of a property: our whole interval is at ``limit`` or above it."""
    rule = f"our whole 95 % interval is at least {limit:g} {unit}"
    return Claim(text, paper, ours, unit, ours.ends[0] >= limit, rule)


def leads(text: str, paper: str, ours: Interval, unit: str, least: float) -> Claim:
    """The claim of a lead: our whole interval is above ``least``, which is more than rounding."""
    rule = f"our whole 95 % interval is above {least:g} {unit}".rstrip()
    return Claim(text, paper, ours, unit, ours.ends[0] > least, rule)


@dataclass(frozen=True)
class Evidence:
    """All that is written down for a figure.

    Attributes
    ----------
    columns, rows
        A tidy table, one row per point.
    settings
        What was drawn and how often, beside the presets.
    what
        How figures came about.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    claims: tuple[Claim, ...]
    findings: tuple[Finding, ...]
    settings: Mapping[str, Cell]
    picture: Figure
    what: str = "times that a model predicts, not measured ones"
