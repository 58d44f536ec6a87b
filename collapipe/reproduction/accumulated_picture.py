"""The picture of figs. 7 and 8."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.comparison import BLIND, METHODS, OWN, Sample
from collapipe.runs.evidence import over_seeds

_AS_LINES = (OWN, "vanilla_fl", "pipeline", "titanic", BLIND)


def picture(samples: Sequence[Sample]) -> Figure:
    """The paper's methods over rounds; all methods' totals with uploads."""
    figure, (left, right) = drawing.panels(3.6, 2, width_ratios=[1, 1.15])
    _draw_lines(left, samples)
    _draw_bars(right, samples)
    drawing.legend_below(figure, (left, right), 4)
    return figure


def _count(samples: Sequence[Sample]) -> int:
    """Of the rounds."""
    return len(samples[0].adapters_s)


def _draw_lines(axes: Axes, samples: Sequence[Sample]) -> None:
    count = _count(samples)
    for place, (mark, method) in enumerate(zip(drawing.MARKS, _AS_LINES, strict=False)):
        mean = np.mean([each.devices_s[method].cumsum() for each in samples], axis=0)
        # Markers apart, so that lines on each other are seen to be several.
        apart = (place % count, max(count // 4, 1))
        axes.plot(
            np.arange(1, count + 1),
            mean,
            **mark.as_line(),
            markevery=apart,
            label=METHODS[method].label,
        )
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("round")
    axes.set_ylabel("accumulated time [s]")
    axes.set_title("(a) on devices")


def _draw_bars(axes: Axes, samples: Sequence[Sample]) -> None:
    places = range(len(METHODS))
    totals = [over_seeds([each.with_uploads(method) for each in samples]) for method in METHODS]
    devices = [float(np.mean([each.on_devices(method) for each in samples])) for method in METHODS]
    uploads = [total.mean - own for total, own in zip(totals, devices, strict=True)]
    axes.barh(places, devices, 0.7, **drawing.MARKS[2].as_bar(), label="on devices")
    axes.barh(places, uploads, 0.7, devices, **drawing.MARKS[1].as_bar(), label="uploads")
    drawing.level_error_bars(axes, places, totals)
    axes.set_yticks(places, [each.label for each in METHODS.values()])
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel(f"total of {_count(samples)} rounds [s]")
    axes.set_title("(b) with uploads")
