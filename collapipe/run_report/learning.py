"""What was learned: loss and metric against rounds, samples and seconds, of one run or several."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from collapipe.run_report.drawing import note
from collapipe.run_report.lines import Point, Series, lines
from collapipe.run_report.markup import Markup, join, tag
from collapipe.run_report.uploads import missing_in_clock
from collapipe.runs.metrics import RoundLine
from collapipe.runs.reading import Run

Value = Callable[[RoundLine], float | None]
_AXES = ("round", "samples", "seconds")


@dataclass(frozen=True, slots=True)
class Curve:
    """A value of some rounds' lines, called ``name`` in the legend."""

    name: str
    style: int
    run: Run
    value: Value

    def points(self, axis: str) -> list[Point]:
        """Of the rounds that have the value, against one of the three axes."""
        return [
            (x, y)
            for x, line in zip(_along(self.run, axis), self.run.rounds, strict=True)
            if (y := self.value(line)) is not None
        ]


def _along(run: Run, axis: str) -> Iterable[float]:
    if axis == "round":
        return [float(line.round) for line in run.rounds]
    if axis == "samples":
        return accumulate(float(line.samples) for line in run.rounds)
    return run.clock.ends_s


def train_loss(line: RoundLine) -> float | None:
    """None: nothing was trained."""
    return line.train_loss


def evaluation_loss(line: RoundLine) -> float | None:
    """None: the round was not evaluated."""
    return line.evaluation_loss


def metric(name: str) -> Value:
    """Of evaluated rounds."""
    return lambda line: line.metric.value if line.metric and line.metric.name == name else None


def metric_names(runs: Iterable[Run]) -> list[str]:
    """Of all evaluations, in the order in which they appear."""
    lines = (line for run in runs for line in run.rounds)
    return list(dict.fromkeys(line.metric.name for line in lines if line.metric))


def clock_label(curves: Sequence[Curve]) -> str:
    """Name of the axis of seconds, with what they are, and whose leave uploads out."""
    known = [curve for curve in curves if curve.run.rounds]
    kinds = " or ".join(sorted({curve.run.clock.kind for curve in known}))
    missing = [text for curve in known if (text := missing_in_clock(curve.run))]
    if not missing:
        return f"seconds, {kinds}"
    names = dict.fromkeys(curve.name for curve in known if missing_in_clock(curve.run))
    whose = f"{', '.join(names)}: " if len(missing) < len(known) else ""
    return f"seconds, {kinds}; {whose}{missing[0]}"


def against_all(title: str, up: str, curves: Sequence[Curve]) -> Markup:
    """The same curves against rounds, samples and seconds; nothing where there is no value."""
    labels = {"round": "round", "samples": "samples", "seconds": clock_label(curves)}
    charts = [
        lines(
            f"{title} against {axis}s" if axis == "round" else f"{title} against {axis}",
            labels[axis],
            up,
            [Series(each.name, each.style, each.points(axis)) for each in curves],
        )
        for axis in _AXES
    ]
    return join(*charts)


def learning(run: Run) -> Markup:
    """A run's loss and metric."""
    of_loss = [
        Curve("training", 0, run, train_loss),
        Curve("validation", 1, run, evaluation_loss),
    ]
    charts = (
        [against_all("Loss", "loss", of_loss)] if any(c.points("round") for c in of_loss) else []
    )
    for number, name in enumerate(metric_names([run])):
        charts.append(against_all(name, name, [Curve(name, number, run, metric(name))]))
    if not charts:
        return note("Nothing was trained and nothing was evaluated.")
    return tag("div", *charts, class_="charts")
