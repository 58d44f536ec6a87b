"""Fig. 6: what each framework learns on three tasks, against rounds and against seconds."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from collapipe.errors import RoundFailedError
from collapipe.reproduction.learning_picture import picture
from collapipe.reproduction.training import Experiment, Job, Training
from collapipe.reproduction.training_curves import COLUMNS, Curve, curve, rows
from collapipe.runs.evidence import (
    Cell,
    Claim,
    Evidence,
    Finding,
    Interval,
    leads,
    over_seeds,
    within_a_quarter,
)

OWN = "collapipe"
FRAMEWORKS: Mapping[str, str] = {
    OWN: "CollaPipe",
    "vanilla_fl": "VanillaFL",
    "pipeline": "PipeLine",
    "titanic": "TITANIC",
}
_OTHERS = tuple(FRAMEWORKS)[1:]
TASKS: Mapping[str, Experiment] = {
    "translation": Experiment("fig06_translation", "multi30k", "full_transformer"),
    "NER": Experiment("fig06_ner", "chinese_ner", "full_bert"),
    "classification": Experiment("fig06_classification", "toutiao15", "full_bert"),
}
AXES: Mapping[str, str] = {
    "rounds": "after equal rounds",
    "devices_s": "after equal seconds on devices",
    "clock_s": "after equal seconds with uploads",
}
_ROUNDING = 0.01  # of a loss
_EARLY = 0.25  # of the time in which the first framework is through its rounds
Sample = Mapping[str, Curve]
"""A task's and a seed's curves, by framework."""
Comparison = Callable[[Sample, str, str], float]


def evidence(seeds: Sequence[int], training: Training) -> Evidence:
    """Every framework on every task."""
    curves = _curves(seeds, training)
    samples = {task: [curves[task, seed] for seed in seeds] for task in TASKS}
    every = [each for sample in curves.values() for each in sample.values()]
    return Evidence(
        columns=("task", "framework", "seed", *COLUMNS),
        rows=[row for (task, seed), each in curves.items() for row in _rows(task, seed, each)],
        claims=tuple(_claims(samples)),
        findings=tuple(_findings(samples)),
        settings={
            "sizes": training.sizes,
            "runs": len(every),
            "runs_wall_s": round(sum(each.wall_s for each in every)),
        },
        picture=picture(samples, FRAMEWORKS),
        what="learning is real, measured on held-out rows; its seconds are modelled",
    )


def _curves(seeds: Sequence[int], training: Training) -> dict[tuple[str, int], Sample]:
    jobs = {
        (task, seed, name): Job(experiment, name, seed, (f"framework={name}",))
        for task, experiment in TASKS.items()
        for seed in seeds
        for name in FRAMEWORKS
    }
    runs = training.runs(list(jobs.values()))
    return {
        (task, seed): {name: curve(runs[jobs[task, seed, name]]) for name in FRAMEWORKS}
        for task in TASKS
        for seed in seeds
    }


def _rows(task: str, seed: int, sample: Sample) -> list[tuple[Cell, ...]]:
    return [(task, name, seed, *row) for name, each in sample.items() for row in rows(each)]


def ahead(sample: Sample, other: str, axis: str) -> float:
    """Our validation metric minus another's where the first framework is through its rounds."""
    place = _shortest(sample, axis)
    return sample[OWN].validation.at(axis, place) - sample[other].validation.at(axis, place)


def gain_percent(samples: Sequence[Sample], other: str, axis: str) -> Interval:
    """The same in % of the other's mean over the seeds.

    Raises ``RoundFailedError`` where the other learned nothing in any of them.
    """
    theirs = [each[other].validation.at(axis, _shortest(each, axis)) for each in samples]
    if not any(theirs):
        label, metric = FRAMEWORKS[other], samples[0][other].metric
        raise RoundFailedError(
            f"{label}: {metric} 0 {AXES[axis]}; nothing is above it by a percent"
        )
    mean = float(np.mean(theirs))
    return over_seeds([100 * ahead(each, other, axis) / mean for each in samples])


def loss_lead(sample: Sample, other: str, axis: str) -> float:
    """How far our validation loss is below another's there."""
    place = _shortest(sample, axis)
    losses = {name: sample[name].validation_losses.at(axis, place) for name in (OWN, other)}
    return losses[other] - losses[OWN]


def early_lead(sample: Sample, other: str, axis: str) -> float:
    """How far our training loss is below another's early on."""
    place = _EARLY * _shortest(sample, axis)
    return sample[other].losses.at(axis, place) - sample[OWN].losses.at(axis, place)


def _shortest(sample: Sample, axis: str) -> float:
    return min(each.losses.end(axis) for each in sample.values())


def _over(samples: Sequence[Sample], compare: Comparison, other: str, axis: str) -> Interval:
    return over_seeds([compare(each, other, axis) for each in samples])


def _claims(samples: Mapping[str, Sequence[Sample]]) -> list[Claim]:
    translation, ner, classification = (samples[task] for task in TASKS)
    claims = list[Claim]()
    for axis, when in AXES.items():
        for other in _OTHERS:
            gain = gain_percent(translation, other, axis)
            text = f"BLEU above {FRAMEWORKS[other]}'s, {when}"
            claims.append(within_a_quarter(text, 19.5, gain, "%"))
    for axis, when in AXES.items():
        for other, paper in (("pipeline", 1.82), ("titanic", 0.15)):
            gain = _over(classification, ahead, other, axis)
            text = f"accuracy above {FRAMEWORKS[other]}'s, {when}"
            claims.append(within_a_quarter(text, paper, gain, "points"))
    for axis, when in AXES.items():
        lead = _over(ner, early_lead, "vanilla_fl", axis)
        text = f"NER's training loss below VanillaFL's in the first quarter, {when}"
        claims.append(leads(text, "falls faster early", lead, "", _ROUNDING))
    return claims


def _findings(samples: Mapping[str, Sequence[Sample]]) -> list[Finding]:
    return [finding for task, each in samples.items() for finding in _of_task(task, each)]


def _of_task(task: str, samples: Sequence[Sample]) -> list[Finding]:
    unit = samples[0][OWN].unit
    found = list[Finding]()
    for name, label in FRAMEWORKS.items():
        tests = over_seeds([each[name].test for each in samples])
        found.append(Finding(f"{task}: {label}'s {samples[0][name].metric} on test", tests, unit))
        for axis, what in (("devices_s", "on devices"), ("clock_s", "with uploads")):
            ends = over_seeds([each[name].losses.end(axis) for each in samples])
            found.append(Finding(f"{task}: {label}'s seconds {what}", ends, "s"))
    for other in _OTHERS:
        label = FRAMEWORKS[other]
        for axis, when in AXES.items():
            lead = _over(samples, ahead, other, axis)
            found.append(Finding(f"{task}: ahead of {label}, {when}", lead, "points"))
            lead = _over(samples, loss_lead, other, axis)
            found.append(Finding(f"{task}: validation loss below {label}'s, {when}", lead, ""))
        for what, name, its in (
            ("losses", "training loss", ""),
            ("validation", f"validation {samples[0][OWN].metric}", "points"),
        ):
            most = over_seeds([apart(each[OWN], each[other], what) for each in samples])
            text = f"{task}: largest difference of {name} from {label} in any round"
            found.append(Finding(text, most, its))
    return found


def apart(one: Curve, other: Curve, what: str) -> float:
    """The largest difference in any round of ``losses`` or ``validation``."""
    first, second = getattr(one, what).values, getattr(other, what).values
    return float(np.abs(first - second).max())
