"""Remark 2: learning over a noisy uplink, at several transmit powers.

Each weight that a unit sends gets noise of variance factor·ε(p), with ε(p) = C/(p·h + I) of
eq. (25). The lemma does not say how an error becomes noise; with a factor of 1, ε is the variance.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from collapipe.errors import ConfigError
from collapipe.run_report.packed import read_requests
from collapipe.runs.evidence import Interval, over_seeds
from collapipe.runs.reading import Run
from optim.problem import Floats
from reproduction import drawing, learning_curves
from reproduction.figure import Finding, Ours, PaperFigure, Row, above
from reproduction.learning_curves import LearningCurve, mean_over_seeds
from reproduction.training import Experiment, Job
from server_app.rounds.replies import noise_variance

POWERS_W = (0.0625, 0.125, 0.25, 0.5)  # P^max: an eighth to all of Table II's, doubled each time
FACTORS = (1.0, 0.1, 0.01, 0.001)  # decades, down to where noise hardly shows
_EXPERIMENT = Experiment("remark2", None, "full_transformer")
_ROUNDING = 0.001  # of a loss
_FASTER, _DIMINISHING = "higher power, faster convergence", "diminishing returns"
_SHOWN = 0.01  # factor of panel (a)


class Setting(NamedTuple):
    """The noise's factor (0: no noise), and the largest power of the uplinks in W."""

    factor: float
    power_w: float


QUIET = Setting(0.0, POWERS_W[-1])
SETTINGS = (QUIET, *(Setting(factor, power) for factor in FACTORS for power in POWERS_W))


class Outcome(NamedTuple):
    """A run's learning curve, and means over rounds and units of planned power p and ε(p)."""

    learned: LearningCurve
    power_w: float
    error: float


Outcomes = Mapping[Setting, Outcome]
"""A seed's runs, with equal rows, initial weights, order, gains and drawn noise."""


def _jobs(seed: int) -> dict[Setting, Job]:
    return {
        each: Job(
            _EXPERIMENT,
            f"factor{each.factor:g}-power{each.power_w:g}" if each.factor else "quiet",
            seed,
            (f"federation.channel_noise={each.factor}", f"channel.max_power_w={each.power_w}"),
        )
        for each in SETTINGS
    }


def _compute(runs: Mapping[Setting, Run]) -> Outcomes:
    learned = learning_curves.learning_curve
    return {each: Outcome(learned(run), *transmission(run)) for each, run in runs.items()}


def transmission(run: Run) -> tuple[float, float]:
    """Return mean power and mean ε(p), with the plans' gains and interference.

    Raises ``ConfigError`` if a plan has no uplink, or its round's request is missing.
    """
    requests = {each.round: each for each in read_requests(run)}
    constant_w = float(run.tree["channel"]["interference_constant_w"])
    powers, errors = list[float](), list[float]()
    for line in run.rounds:
        for plan in line.plan.clusters:
            if plan.uplink is None or line.round not in requests:
                raise ConfigError(
                    f"{run.folder}: round {line.round} has no transmit power of unit {plan.unit}; "
                    "remove the folder, so that it is run again"
                )
            powers.append(plan.uplink.power_w)
            errors.append(noise_variance(plan, requests[line.round], constant_w, 1.0))
    return float(np.mean(powers)), float(np.mean(errors))


def _rows(seed: int, outcomes: Outcomes) -> Iterator[Row]:
    for setting, (learned, power_w, error) in outcomes.items():
        yield from ((setting.factor, power_w, error, seed, *row) for row in learned.rows())


def _gains(values: Floats) -> Floats:
    """Return by how much each doubling of power reduces ``values`` [seeds, P]: [seeds, P - 1]."""
    return -np.diff(values)


def _gains_per_watt(values: Floats) -> Floats:
    """Return the gains per watt, 1/W; they decrease if ``values`` are convex in p."""
    return _gains(values) / np.diff(POWERS_W)


def _findings(seeds: Sequence[Outcomes]) -> Iterator[Finding]:
    # ε(p) over the powers; noise changes nothing of it.
    errors = np.array([[each[Setting(FACTORS[0], p)].error for p in POWERS_W] for each in seeds])
    falls = over_seeds(_gains(errors).min(axis=1))
    bends = over_seeds(_gains(_gains_per_watt(errors)).min(axis=1))
    text = "ε: least {} with a doubling of p"
    yield above(text.format("fall"), _FASTER, falls, "", 0.0)
    text = text.format("shrinking of its fall per watt")
    yield above(text, _DIMINISHING, bends, "1/W", 0.0)
    for factor in FACTORS:
        settings = [Setting(factor, power) for power in POWERS_W]
        losses = np.array([[each[s].learned.test_loss for s in settings] for each in seeds])
        what = f"factor {factor:g}: test loss"
        text = f"{what} with {POWERS_W[0]:g} W above that with {POWERS_W[-1]:g} W"
        yield above(text, _FASTER, _first_minus_last(losses), "", _ROUNDING)
        watts = _first_minus_last(_gains_per_watt(losses))
        text = f"{what}: a watt of the first doubling takes more off than one of the last"
        yield above(text, _DIMINISHING, watts, "1/W", _ROUNDING)
        doublings = _first_minus_last(_gains(losses))
        text = f"{what}: the first doubling takes more off than the last"
        yield above(text, _DIMINISHING, doublings, "", _ROUNDING)
    for power, error in zip(POWERS_W, drawing.over_places(errors), strict=True):
        yield Finding(f"ε with {power:g} W", error, "")
    for setting in SETTINGS:
        name = f"factor {setting.factor:g}, {setting.power_w:g} W" if setting.factor else "no noise"
        curves = [each[setting].learned for each in seeds]
        yield Finding(f"{name}: test loss", over_seeds(each.test_loss for each in curves), "")
        score = over_seeds(each.test for each in curves)
        yield Finding(f"{name}: test {curves[0].metric}", score, curves[0].unit)
        if setting.factor:
            excess = over_seeds(
                each[setting].learned.test_loss - each[QUIET].learned.test_loss for each in seeds
            )
            yield Finding(f"{name}: test loss above that without noise", excess, "")


def _first_minus_last(values: Floats) -> Interval:
    return over_seeds(values[:, 0] - values[:, -1])


def _draw(seeds: Sequence[Outcomes], ours: Ours) -> Figure:
    """Draw training curves at several powers, and test loss and transmission error over p."""
    figure, (left, middle, right) = drawing.panels(3.6, 3)
    shown = {f"{power:g} W": Setting(_SHOWN, power) for power in POWERS_W} | {"no noise": QUIET}
    series = {
        label: mean_over_seeds([each[setting].learned for each in seeds], "losses")
        for label, setting in shown.items()
    }
    drawing.draw_lines(left, series)
    left.set(xlim=(0, None), yscale="log", xlabel="round", ylabel="training loss")
    left.set_title(f"(a) factor {_SHOWN:g}")
    losses = {
        f"factor {each:g}": [ours[f"factor {each:g}, {p:g} W: test loss"] for p in POWERS_W]
        for each in FACTORS
    } | {"no noise": [ours["no noise: test loss"]] * len(POWERS_W)}
    drawing.draw_lines(middle, {label: (POWERS_W, found) for label, found in losses.items()})
    middle.set(ylabel="test loss", title="(b) several factors")
    drawing.draw_lines(right, {"": (POWERS_W, [ours[f"ε with {p:g} W"] for p in POWERS_W])})
    right.set(ylabel="ε(p), mean of units", title="(c) transmission error")
    for axes in (middle, right):
        axes.set(xlim=(0, None), ylim=(0, None), xlabel="transmit power p [W]")
    for axes in (left, middle):
        drawing.legend_below(axes, 2)
    return figure


_COLUMNS = ("factor", "power_w", "error", *learning_curves.COLUMNS)
_BASIS = f"{learning_curves.BASIS}; the noise of the uplink is drawn"
FIGURE = PaperFigure(
    "remark2", _COLUMNS, _compute, _rows, _findings, _draw, num_seeds=3, jobs=_jobs, basis=_BASIS
)
