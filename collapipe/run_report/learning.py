"""Show loss and metrics of one or several runs over rounds, samples and seconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from statistics import fmean

from collapipe.report import RoundReport
from collapipe.run_report.charts import Point, Series, lines
from collapipe.run_report.html import Markup, charts, note
from collapipe.runs.reading import Run

Value = Callable[[RoundReport], float | None]
TRAIN_LOSS: Value = attrgetter("train_loss")
EVALUATION_LOSS: Value = attrgetter("evaluation_loss")
EPSILON: Value = attrgetter("epsilon")


@dataclass(frozen=True, slots=True)
class Curve:
    """A value over rounds, named ``name`` in the legend.

    For several ``runs`` it is their mean, in rounds in which all runs have the value. A run without
    any, such as one that ended before its first round, is left out.
    """

    name: str
    style: int
    runs: Sequence[Run]
    value: Value

    def series(self, axis: str) -> Series:
        """Return the mean over one of the three axes, and a band from the least to the most."""
        every = [points for run in self.runs if (points := _points(run, axis, self.value))]
        first = every[0] if every else {}
        common = [number for number in first if all(number in points for points in every)]
        found = [zip(*(points[number] for points in every), strict=True) for number in common]
        values = [(fmean(xs), ys) for xs, ys in found]
        means = [(x, fmean(ys)) for x, ys in values]
        band = [(x, min(ys), max(ys)) for x, ys in values] if len(every) > 1 else ()
        return Series(self.name, self.style, means, band=band)


def _points(run: Run, axis: str, value: Value) -> dict[int, Point]:
    """Return the value of each round that has one, with its place on the axis."""
    places: dict[str, Iterable[float]] = {
        "round": (float(line.round) for line in run.rounds),
        "samples": accumulate(float(line.samples) for line in run.rounds),
        "seconds": (line.clock_s for line in run.rounds),
    }
    return {
        line.round: (x, y)
        for x, line in zip(places[axis], run.rounds, strict=True)
        if (y := value(line)) is not None
    }


def metric(name: str, on_units: bool = False) -> Value:
    """Return a function that gives a round's value of the metric ``name``, or None."""

    def value(line: RoundReport) -> float | None:
        evaluated = line.on_units if on_units else line
        found = evaluated.metric if evaluated else None
        return found.value if found and found.name == name else None

    return value


def metric_names(runs: Iterable[Run]) -> list[str]:
    """Return the names of all evaluated metrics, in the order in which they first appear."""
    lines = (line for run in runs for line in run.rounds)
    return list(dict.fromkeys(line.metric.name for line in lines if line.metric))


def _clock_label(curves: Sequence[Curve]) -> str:
    """Return the label of the axis of seconds: its clock, and runs without uploads in it."""
    known = [(curve.name, run) for curve in curves for run in curve.runs if run.rounds]
    kinds = " or ".join(sorted({run.clock_kind for _, run in known}))
    missing = [(name, text) for name, run in known if (text := run.missing_in_clock)]
    if not missing:
        return f"seconds, {kinds}"
    names = ", ".join(dict.fromkeys(name for name, _ in missing))
    return f"seconds, {kinds}; {f'{names}: ' * (len(missing) < len(known))}{missing[0][1]}"


def learning(run: Run) -> Markup:
    """Show a run's loss and metrics."""
    values = [("training", TRAIN_LOSS), ("validation", EVALUATION_LOSS)]
    both = run.option("evaluation.where") == "both"
    if both:
        values.append(("on units", lambda line: line.on_units.loss if line.on_units else None))
    losses = [Curve(name, style, [run], value) for style, (name, value) in enumerate(values)]
    of_metrics = [
        (
            name,
            name,
            [
                Curve(f"{name} on units" if own else name, n + own, [run], metric(name, own))
                for own in (False, True)[: 1 + both]
            ],
        )
        for n, name in enumerate(metric_names([run]))
    ]
    private = "Privacy of a unit, ε of all rounds so far", "ε", [Curve("ε", 0, [run], EPSILON)]
    return learned([("Loss", "loss", losses), *of_metrics, private])


def learned(drawn: Iterable[tuple[str, str, Sequence[Curve]]]) -> Markup:
    """Return charts of titles, labels and curves over each axis, if any round has a value."""
    found = [
        lines(f"{title} against {across}", label, up, [curve.series(axis) for curve in curves])
        for title, up, curves in drawn
        if any(curve.series("round").points for curve in curves)
        for axis, across, label in (
            ("round", "rounds", "round"),
            ("samples", "samples", "samples"),
            ("seconds", "seconds", _clock_label(curves)),
        )
    ]
    return charts(*found) if found else note("There is no loss and no metric to draw.")
