"""The picture of the frameworks' delays: a round of each, and where CollaPipe beats VanillaFL."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.frameworks import (
    LABELS,
    PAYLOADS,
    Sample,
    Seconds,
    against_rival,
    mean_cluster_s,
    plain,
    total_s,
)
from collapipe.runs.evidence import Interval, over_seeds


def picture(samples: Sequence[Sample], factors: Sequence[float]) -> Figure:
    """Rounds on static devices; cuts over the uplinks' bandwidth, as ``factors`` of Table II's."""
    figure, (left, right) = drawing.panels(3.8, 2, width_ratios=[1.1, 1])
    _draw_rounds(left, samples)
    _draw_cuts(right, samples, factors)
    drawing.legend_below(figure, (left, right), 3)
    return figure


def _draw_rounds(axes: Axes, samples: Sequence[Sample]) -> None:
    bars = (
        ("cluster delay", mean_cluster_s, "activations too"),
        ("total, adapters", total_s, "adapters"),
        ("total, activations too", total_s, "activations too"),
    )
    for offset, mark, (label, seconds, uploads) in zip(
        (-0.27, 0.0, 0.27), drawing.MARKS[4:], bars, strict=False
    ):
        places = [place + offset for place in range(len(LABELS))]
        found = [_a_round(samples, name, seconds, uploads) for name in LABELS]
        axes.barh(places, [each.mean for each in found], 0.26, **mark.as_bar(), label=label)
        drawing.level_error_bars(axes, places, found)
    axes.set_yticks(np.arange(len(LABELS)), LABELS.values())
    axes.invert_yaxis()
    axes.set_xlabel("a round [s]")
    axes.set_title("(a) static clusters")


def _a_round(samples: Sequence[Sample], framework: str, seconds: Seconds, uploads: str) -> Interval:
    courses = [each[plain(framework, uploads=uploads)] for each in samples]
    return over_seeds([seconds(course) / len(course) for course in courses])


def _draw_cuts(axes: Axes, samples: Sequence[Sample], factors: Sequence[float]) -> None:
    for mark, payload in zip(drawing.MARKS, PAYLOADS, strict=False):
        found = [against_rival(samples, payload, factor) for factor in factors]
        axes.plot(factors, [each.mean for each in found], **mark.as_line(), label=payload)
        drawing.error_bars(axes, factors, found)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("uplinks' bandwidth [Table II's]")
    axes.set_ylabel("total below VanillaFL's by [%]")
    axes.set_title("(b) CollaPipe against VanillaFL")
