"""Fig. 6: what each framework learns on three tasks, against rounds and against seconds."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from collapipe.errors import RoundFailedError
from collapipe.reproduction import drawing
from collapipe.reproduction.figure import Finding, PaperFigure, above, within_a_quarter
from collapipe.reproduction.learning_curves import (
    COLUMNS,
    LearningCurve,
    curve_rows,
    learning_curves,
    mean_over_seeds,
)
from collapipe.reproduction.training import Experiment, Job
from collapipe.runs.evidence import Interval, over_seeds

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
_LABELS = {"rounds": "round", "devices_s": "hours on devices", "clock_s": "hours with uploads"}
_ROUNDING = 0.01  # of a loss
_EARLY = 0.25  # of the time in which the first framework is through its rounds
Curves = Mapping[str, LearningCurve]
"""A task's and a seed's curves, by framework."""
Key = tuple[str, str]  # task and framework
Seeds = Sequence[Mapping[Key, LearningCurve]]
Comparison = Callable[[Curves, str, str], float]


def _jobs(seed: int) -> dict[Key, Job]:
    return {
        (task, name): Job(experiment, name, seed, (f"framework={name}",))
        for task, experiment in TASKS.items()
        for name in FRAMEWORKS
    }


def _of(seeds: Seeds, task: str) -> list[Curves]:
    return [{name: each[task, name] for name in FRAMEWORKS} for each in seeds]


def ahead(curves: Curves, other: str, axis: str) -> float:
    """Our validation metric minus another's where the first framework is through its rounds."""
    place = _shortest(curves, axis)
    return curves[OWN].validation.at(axis, place) - curves[other].validation.at(axis, place)


def gain_percent(seeds: Sequence[Curves], other: str, axis: str) -> Interval:
    """The same in % of the other's mean over the seeds.

    Raises ``RoundFailedError`` where the other learned nothing in any of them.
    """
    theirs = [each[other].validation.at(axis, _shortest(each, axis)) for each in seeds]
    if not any(theirs):
        label, metric = FRAMEWORKS[other], seeds[0][other].metric
        raise RoundFailedError(
            f"{label}: {metric} 0 {AXES[axis]}; nothing is above it by a percent"
        )
    mean = float(np.mean(theirs))
    return over_seeds(100 * ahead(each, other, axis) / mean for each in seeds)


def loss_lead(curves: Curves, other: str, axis: str) -> float:
    """How far our validation loss is below another's there."""
    place = _shortest(curves, axis)
    losses = {name: curves[name].validation_losses.at(axis, place) for name in (OWN, other)}
    return losses[other] - losses[OWN]


def early_lead(curves: Curves, other: str, axis: str) -> float:
    """How far our training loss is below another's early on."""
    place = _EARLY * _shortest(curves, axis)
    return curves[other].losses.at(axis, place) - curves[OWN].losses.at(axis, place)


def _shortest(curves: Curves, axis: str) -> float:
    return min(each.losses.end(axis) for each in curves.values())


def _over(seeds: Sequence[Curves], compare: Comparison, other: str, axis: str) -> Interval:
    return over_seeds(compare(each, other, axis) for each in seeds)


def _findings(seeds: Seeds) -> Iterator[Finding]:
    translation, ner, classification = (_of(seeds, task) for task in TASKS)
    for axis, when in AXES.items():
        for other in _OTHERS:
            gain = gain_percent(translation, other, axis)
            yield within_a_quarter(f"BLEU above {FRAMEWORKS[other]}'s, {when}", 19.5, gain, "%")
        for other, paper in (("pipeline", 1.82), ("titanic", 0.15)):
            gain = _over(classification, ahead, other, axis)
            text = f"accuracy above {FRAMEWORKS[other]}'s, {when}"
            yield within_a_quarter(text, paper, gain, "points")
        lead = _over(ner, early_lead, "vanilla_fl", axis)
        text = f"NER's training loss below VanillaFL's in the first quarter, {when}"
        yield above(text, "falls faster early", lead, "", _ROUNDING)
    for task in TASKS:
        yield from _of_task(task, _of(seeds, task))


def _of_task(task: str, seeds: Sequence[Curves]) -> Iterator[Finding]:
    metric, unit = seeds[0][OWN].metric, seeds[0][OWN].unit
    for name, label in FRAMEWORKS.items():
        tests = over_seeds(each[name].test for each in seeds)
        yield Finding(f"{task}: {label}'s {metric} on test", tests, unit)
        for axis, what in (("devices_s", "on devices"), ("clock_s", "with uploads")):
            ends = over_seeds(each[name].losses.end(axis) for each in seeds)
            yield Finding(f"{task}: {label}'s seconds {what}", ends, "s")
    for other in _OTHERS:
        label = FRAMEWORKS[other]
        for axis, when in AXES.items():
            lead = _over(seeds, ahead, other, axis)
            yield Finding(f"{task}: ahead of {label}, {when}", lead, "points")
            lead = _over(seeds, loss_lead, other, axis)
            yield Finding(f"{task}: validation loss below {label}'s, {when}", lead, "")
        for what, name, its in (
            ("losses", "training loss", ""),
            ("validation", f"validation {metric}", "points"),
        ):
            most = over_seeds(largest_difference(each[OWN], each[other], what) for each in seeds)
            text = f"{task}: largest difference of {name} from {label} in any round"
            yield Finding(text, most, its)


def largest_difference(one: LearningCurve, other: LearningCurve, what: str) -> float:
    """In any round of ``losses`` or ``validation``."""
    return float(np.abs(getattr(one, what).values - getattr(other, what).values).max())


def _draw(seeds: Seeds) -> Figure:
    """A row a task: its metric against rounds and two kinds of modelled seconds."""
    figure, panels = drawing.panels(1.9 * len(TASKS) + 0.5, len(AXES), len(TASKS), sharey="row")
    for axes, (task, axis) in zip(panels, itertools.product(TASKS, AXES), strict=True):
        curves, unit = _of(seeds, task), 1.0 if axis == "rounds" else 3600.0
        series = {
            label: mean_over_seeds([each[name].validation for each in curves], axis, unit)
            for name, label in FRAMEWORKS.items()
        }
        drawing.draw_lines(axes, series, nested=True)
        axes.set(xlim=(0, None), ylim=(0, None), xlabel=_LABELS[axis])
        if axis == "rounds":
            axes.set_ylabel(f"{task}: {curves[0][OWN].metric_label}")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(FRAMEWORKS))
    return figure


FIGURE = PaperFigure(
    "fig06",
    ("task", "framework", *COLUMNS),
    learning_curves,
    curve_rows,
    _findings,
    _draw,
    num_seeds=3,
    jobs=_jobs,
    basis="learning is real, measured on held-out rows; its seconds are modelled",
)
