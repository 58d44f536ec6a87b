"""The picture of Remark 2: curves at several powers; test loss and error of transmission over p."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.remark2 import FACTORS, POWERS_W, QUIET, Sample, Setting, errors, losses
from collapipe.reproduction.training_curves import Points
from collapipe.runs.evidence import over_seeds

_SHOWN = 0.01  # factor of panel (a)
_CURVES = {
    "no noise": QUIET,
    **{f"{power:g} W": Setting(_SHOWN, power) for power in POWERS_W},
}


def picture(samples: Sequence[Sample]) -> Figure:
    """Means over seeds; bars are 95 % intervals."""
    figure, axes = drawing.panels(3.4, 3)
    _draw_curves(axes[0], samples)
    _draw_losses(axes[1], samples)
    _draw_errors(axes[2], samples)
    for each in axes[1:]:
        each.set_xlim(0)
        each.set_ylim(0)
        each.set_xlabel("transmit power p [W]")
    drawing.legend_below(figure, axes[:2], 5)
    return figure


def _draw_curves(axes: Axes, samples: Sequence[Sample]) -> None:
    for place, (mark, (label, setting)) in enumerate(
        zip(drawing.MARKS, _CURVES.items(), strict=False)
    ):
        mean = Points.mean([each[setting].learned.losses for each in samples])
        # Marks apart, so that lines on each other are seen to be several.
        markevery = (place, len(_CURVES))
        axes.plot(mean.rounds, mean.values, **mark.as_line(), markevery=markevery, label=label)
    axes.set_xlim(0)
    axes.set_yscale("log")
    axes.set_xlabel("round")
    axes.set_ylabel("training loss")
    axes.set_title(f"(a) factor {_SHOWN:g}")


def _draw_losses(axes: Axes, samples: Sequence[Sample]) -> None:
    for mark, factor in zip(drawing.MARKS[len(_CURVES) :], FACTORS, strict=False):
        each = np.array([losses(sample, factor) for sample in samples])
        axes.plot(POWERS_W, each.mean(axis=0), **mark.as_line(), label=f"factor {factor:g}")
        drawing.error_bars(axes, POWERS_W, [over_seeds(column) for column in each.T.tolist()])
    quiet = np.mean([each[QUIET].learned.test_loss for each in samples])
    axes.axhline(float(quiet), color=drawing.MARKS[0].shade, linewidth=0.8)
    axes.set_ylabel("test loss")
    axes.set_title("(b) several factors")


def _draw_errors(axes: Axes, samples: Sequence[Sample]) -> None:
    each = np.array([errors(sample) for sample in samples])
    axes.plot(POWERS_W, each.mean(axis=0), "o-", color="black")
    drawing.error_bars(axes, POWERS_W, [over_seeds(column) for column in each.T.tolist()])
    axes.set_ylabel("ε(p), mean of units")
    axes.set_title("(c) transmission error")
