"""Fig. 6: metrics of each framework on three tasks, over rounds and over seconds."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from collapipe.errors import RoundFailedError
from collapipe.runs.evidence import Interval, over_seeds
from optim.problem import Floats
from reproduction import drawing, learning_curves
from reproduction.figure import Finding, Ours, PaperFigure, above, near
from reproduction.learning_curves import LearningCurve, mean_over_seeds
from reproduction.training import SINGLE, Experiment, Job

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
AXIS_LABELS: Mapping[str, str] = {
    "rounds": "round",
    "devices_s": "hours on devices",
    "clock_s": "hours with uploads",
}
_ROUNDING = 0.01  # of a loss
_EARLY = 0.25  # of the time in which the first framework is through its rounds
Key = tuple[str, str]  # task and framework
Seeds = Sequence[Mapping[Key, LearningCurve]]


def _jobs(seed: int) -> dict[Key, Job]:
    return {
        (task, name): Job(experiment, name, seed, (f"framework={name}", SINGLE))
        for task, experiment in TASKS.items()
        for name in FRAMEWORKS
    }


def _values(
    seeds: Seeds, key: Key, axis: str, what: str = "validation", share: float = 1.0
) -> Floats:
    """Return a framework's value of each seed at ``share`` of the place on ``axis``.

    The place is the one at which the first framework has finished its rounds.
    """
    task, _ = key
    ends = [share * min(each[task, name].end(axis) for name in FRAMEWORKS) for each in seeds]
    return np.array([each[key].at(what, axis, end) for each, end in zip(seeds, ends, strict=True)])


def _lead(
    seeds: Seeds, task: str, other: str, axis: str, what: str = "validation", share: float = 1.0
) -> Interval:
    """Return how far CollaPipe's value is above the other's, at the place of ``_values``."""
    own, theirs = (_values(seeds, (task, name), axis, what, share) for name in (OWN, other))
    return over_seeds(own - theirs)


def gain_percent(seeds: Seeds, task: str, other: str, axis: str) -> Interval:
    """Return the lead of the validation metric in % of the other's mean over the seeds.

    Raises ``RoundFailedError`` if the other learned nothing in any seed.
    """
    own, theirs = (_values(seeds, (task, name), axis) for name in (OWN, other))
    if not theirs.any():
        label, metric = FRAMEWORKS[other], seeds[0][task, other].metric
        raise RoundFailedError(f"{label}: {metric} 0 {AXES[axis]}; no percentage of it exists")
    return over_seeds(100 * (own - theirs) / theirs.mean())


def _findings(seeds: Seeds) -> Iterator[Finding]:
    for axis, when in AXES.items():
        for other in _OTHERS:
            gain = gain_percent(seeds, "translation", other, axis)
            yield near(f"BLEU above {FRAMEWORKS[other]}'s, {when}", 19.5, gain, "%")
        for other, paper in (("pipeline", 1.82), ("titanic", 0.15)):
            text = f"accuracy above {FRAMEWORKS[other]}'s, {when}"
            yield near(text, paper, _lead(seeds, "classification", other, axis), "points")
        early = -_lead(seeds, "NER", "vanilla_fl", axis, "losses", _EARLY)
        text = f"NER's training loss below VanillaFL's in the first quarter, {when}"
        yield above(text, "falls faster early", early, "", _ROUNDING)
    for task in TASKS:
        yield from _of_task(seeds, task)


def _of_task(seeds: Seeds, task: str) -> Iterator[Finding]:
    metric, unit = seeds[0][task, OWN].metric, seeds[0][task, OWN].unit
    for name, label in FRAMEWORKS.items():
        tests = over_seeds(each[task, name].test for each in seeds)
        yield Finding(f"{task}: {label}'s {metric} on test", tests, unit)
        for axis, what in (("devices_s", "on devices"), ("clock_s", "with uploads")):
            ends = over_seeds(each[task, name].end(axis) for each in seeds)
            yield Finding(f"{task}: {label}'s seconds {what}", ends, "s")
    for other in _OTHERS:
        label = FRAMEWORKS[other]
        for axis, when in AXES.items():
            gain = _lead(seeds, task, other, axis)
            yield Finding(f"{task}: ahead of {label}, {when}", gain, "points")
            losses = -_lead(seeds, task, other, axis, "validation_losses")
            yield Finding(f"{task}: validation loss below {label}'s, {when}", losses, "")
        for what, name, its in (
            ("losses", "training loss", ""),
            ("validation", f"validation {metric}", "points"),
        ):
            pairs = ((each[task, OWN], each[task, other]) for each in seeds)
            apart = (getattr(own, what) - getattr(their, what) for own, their in pairs)
            most = over_seeds(float(np.nanmax(np.abs(each))) for each in apart)
            text = f"{task}: largest difference of {name} from {label} in any round"
            yield Finding(text, most, its)


def _draw(seeds: Seeds, _: Ours) -> Figure:
    """Draw a row per task: its metric over rounds and over two kinds of modelled seconds."""
    figure, panels = drawing.panels(1.9 * len(TASKS) + 0.5, len(AXES), len(TASKS), sharey="row")
    for axes, (task, axis) in zip(panels, itertools.product(TASKS, AXES), strict=True):
        unit = 1.0 if axis == "rounds" else 3600.0
        series = {
            label: mean_over_seeds([each[task, name] for each in seeds], "validation", axis, unit)
            for name, label in FRAMEWORKS.items()
        }
        drawing.draw_lines(axes, series, nested=True)
        axes.set(xlim=(0, None), ylim=(0, None), xlabel=AXIS_LABELS[axis])
        if axis == "rounds":
            axes.set_ylabel(f"{task}: {seeds[0][task, OWN].metric_label}")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(FRAMEWORKS))
    return figure


_COLUMNS = ("task", "framework", *learning_curves.COLUMNS)
_BASIS = f"{learning_curves.BASIS}; its seconds are modelled"
_CURVES = learning_curves.curves, learning_curves.rows
FIGURE = PaperFigure(
    "fig06", _COLUMNS, *_CURVES, _findings, _draw, num_seeds=3, jobs=_jobs, basis=_BASIS
)
