"""Remark 2: what is learned over a noisy uplink, at several transmit powers.

Each weight that a unit sends gets noise of variance factor·ε(p), with ε(p) = C/(p·h + I) of
eq. (25). The lemma leaves open how much noise an error is; a factor of 1 takes ε for the variance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe.reproduction.sent import Sent, sent
from collapipe.reproduction.training import Experiment, Job, Training
from collapipe.reproduction.training_curves import COLUMNS, Curve, curve, rows
from collapipe.runs.evidence import Claim, Evidence, Finding, leads, over_seeds

POWERS_W = (0.0625, 0.125, 0.25, 0.5)  # P^max: an eighth to all of Table II's, doubled each time
FACTORS = (1.0, 0.1, 0.01, 0.001)  # decades, down to where noise hardly shows
_EXPERIMENT = Experiment("remark2", None, "full_transformer")
_ROUNDING = 0.001  # of a loss
_FASTER, _DIMINISHING = "higher power, faster convergence", "diminishing returns"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A world's uplinks: the noise's factor, 0 for none, and the most power in W."""

    factor: float
    power_w: float


QUIET = Setting(0.0, POWERS_W[-1])
SETTINGS = (QUIET, *(Setting(factor, power) for factor in FACTORS for power in POWERS_W))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run learned, and how its units sent."""

    learned: Curve
    sent: Sent


Sample = Mapping[Setting, Outcome]
"""A seed's runs: the same rows, first weights, order and gains, and noise of the same draw."""


def evidence(seeds: Sequence[int], training: Training) -> Evidence:
    """Differences of the same seed, so that nothing but the noise's size is between two runs."""
    from collapipe.reproduction.remark2_picture import picture

    jobs = {(seed, each): _job(seed, each) for seed in seeds for each in SETTINGS}
    runs = training.runs(list(jobs.values()))
    found = {key: Outcome(curve(runs[job]), sent(runs[job])) for key, job in jobs.items()}
    samples = [{each: found[seed, each] for each in SETTINGS} for seed in seeds]
    return Evidence(
        columns=("factor", "power_w", "error", "seed", *COLUMNS),
        rows=[
            (setting.factor, each.sent.power_w, each.sent.error, seed, *row)
            for (seed, setting), each in found.items()
            for row in rows(each.learned)
        ],
        claims=tuple(_claims(samples)),
        findings=tuple(_findings(samples)),
        settings={
            "sizes": training.sizes,
            "runs": len(found),
            "runs_wall_s": round(sum(each.learned.wall_s for each in found.values())),
        },
        picture=picture(samples),
        what="learning is real, measured on held-out rows; the noise of the uplink is drawn",
    )


def _job(seed: int, setting: Setting) -> Job:
    loud = f"factor{setting.factor:g}-power{setting.power_w:g}"
    overrides = (
        f"federation.channel_noise={setting.factor}",
        f"channel.max_power_w={setting.power_w}",
    )
    return Job(_EXPERIMENT, loud if setting.factor else "quiet", seed, overrides)


def errors(sample: Sample) -> Floats:
    """ε(p) over the powers, [P]; noise changes nothing of it."""
    return np.array([sample[Setting(FACTORS[0], power)].sent.error for power in POWERS_W])


def losses(sample: Sample, factor: float) -> Floats:
    """Test losses over the powers, [P]."""
    return np.array([sample[Setting(factor, power)].learned.test_loss for power in POWERS_W])


def gains(values: Floats) -> Floats:
    """What each doubling of the power takes off ``values`` [P], as [P - 1]."""
    return -np.diff(values)


def gains_per_watt(values: Floats) -> Floats:
    """The same for each watt of the doubling, 1/W; they fall where ``values`` are convex in p."""
    return gains(values) / np.diff(POWERS_W)


def _claims(samples: Sequence[Sample]) -> list[Claim]:
    every = [errors(each) for each in samples]
    falls = over_seeds([float(gains(each).min()) for each in every])
    bends = over_seeds([float(gains(gains_per_watt(each)).min()) for each in every])
    text = "ε: least {} with a doubling of p"
    found = [
        leads(text.format("fall"), _FASTER, falls, "", 0.0),
        leads(text.format("shrinking of its fall per watt"), _DIMINISHING, bends, "1/W", 0.0),
    ]
    for factor in FACTORS:
        found += _learning(f"factor {factor:g}: test loss", [losses(s, factor) for s in samples])
    return found


def _learning(what: str, values: Sequence[Floats]) -> list[Claim]:
    """``values``: of each seed, [P]."""
    whole = over_seeds([float(each[0] - each[-1]) for each in values])
    watts = over_seeds([_first_minus_last(gains_per_watt(each)) for each in values])
    doublings = over_seeds([_first_minus_last(gains(each)) for each in values])
    text = f"{what} with {POWERS_W[0]:g} W above that with {POWERS_W[-1]:g} W"
    first = "a watt of the first doubling takes more off than one of the last"
    more = "the first doubling takes more off than the last"
    return [
        leads(text, _FASTER, whole, "", _ROUNDING),
        leads(f"{what}: {first}", _DIMINISHING, watts, "1/W", _ROUNDING),
        leads(f"{what}: {more}", _DIMINISHING, doublings, "", _ROUNDING),
    ]


def _first_minus_last(values: Floats) -> float:
    return float(values[0] - values[-1])


def _findings(samples: Sequence[Sample]) -> list[Finding]:
    found = list[Finding]()
    for place, power in enumerate(POWERS_W):
        error = over_seeds([float(errors(each)[place]) for each in samples])
        found.append(Finding(f"ε with {power:g} W", error, ""))
    for setting in SETTINGS:
        found += _of_setting(setting, samples)
    return found


def _of_setting(setting: Setting, samples: Sequence[Sample]) -> list[Finding]:
    factor, metric = setting.factor, samples[0][setting].learned.metric
    name = f"factor {factor:g}, {setting.power_w:g} W" if factor else "no noise"
    curves = [each[setting].learned for each in samples]
    loss = over_seeds([each.test_loss for each in curves])
    score = over_seeds([each.test for each in curves])
    found = [
        Finding(f"{name}: test loss", loss, ""),
        Finding(f"{name}: test {metric}", score, curves[0].unit),
    ]
    if factor:
        excess = over_seeds(
            [each[setting].learned.test_loss - each[QUIET].learned.test_loss for each in samples]
        )
        found.append(Finding(f"{name}: test loss above that without noise", excess, ""))
    return found
