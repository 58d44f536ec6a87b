"""The picture of fig. 6: a row a task; its metric against rounds and two kinds of seconds."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.training_curves import Curve, Points

_AXES = (
    ("rounds", "round", 1.0),
    ("devices_s", "hours on devices", 3600.0),
    ("clock_s", "hours with uploads", 3600.0),
)


def picture(
    samples: Mapping[str, Sequence[Mapping[str, Curve]]], labels: Mapping[str, str]
) -> Figure:
    """Means over seeds; seconds are modelled."""
    figure = Figure((drawing.WIDTH_IN, 1.9 * len(samples) + 0.5), layout="constrained")
    grid = figure.subplots(len(samples), len(_AXES), squeeze=False, sharey="row")
    for row, (task, each) in zip(grid, samples.items(), strict=True):
        for axes, (axis, name, unit) in zip(row, _AXES, strict=True):
            _draw(axes, each, labels, axis, unit)
            axes.set_xlabel(name)
        first = next(iter(each[0].values()))
        row[0].set_ylabel(f"{task}: {first.metric}{first.unit and f' [{first.unit}]'}")
    drawing.legend_below(figure, [grid[0][0]], len(labels))
    return figure


def _draw(
    axes: Axes,
    samples: Sequence[Mapping[str, Curve]],
    labels: Mapping[str, str],
    axis: str,
    unit: float,
) -> None:
    for place, (mark, name) in enumerate(zip(drawing.MARKS, labels, strict=False)):
        mean = Points.mean([each[name].validation for each in samples])
        axes.plot(
            getattr(mean, axis) / unit,
            mean.values,
            **mark.as_line(),
            # Wide below narrow, so that lines on each other are seen to be several.
            linewidth=4 - place,
            label=labels[name],
        )
    axes.set_xlim(0)
    axes.set_ylim(0)
