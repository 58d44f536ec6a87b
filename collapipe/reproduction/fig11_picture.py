"""The picture of fig. 11: totals over rounds; delay, participation and queues over V."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.fig11 import MAIN, WEIGHTS, WORLDS, Sample, cut, dssra, shares
from collapipe.runs.evidence import Interval, over_seeds

_AS_LINES = (*(dssra(weight) for weight in (0.01, 0.1, 10.0)), "random", "delay-only")
_WORLDS = drawing.MARKS[len(_AS_LINES) :]
_BEYOND = 60.0  # where delay-only stands on the axis of V
# A little apart, so that bars on each other are seen to be several.
_PLACES = tuple(
    [weight * 1.13**step for weight in (*WEIGHTS, _BEYOND)] for step in (-1.5, -0.5, 0.5, 1.5)
)


def picture(samples: Sequence[Sample]) -> Figure:
    """Four panels; bars are 95 % intervals."""
    figure, (totals, delays, rounds, queues) = drawing.panels(6.2, 2, rows=2)
    for axes in (delays, rounds, queues):
        _over_weights(axes)
    _draw_totals(totals, samples)
    _draw_delays(delays, samples)
    _draw_shares(rounds, samples)
    _draw_queues(queues, samples)
    drawing.legend_below(figure, (totals, delays), 3)
    return figure


def _over_weights(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xticks(WEIGHTS, [f"{weight:g}" for weight in WEIGHTS])
    axes.minorticks_off()
    axes.set_xlabel("V [1/s]")


def _draw_totals(axes: Axes, samples: Sequence[Sample]) -> None:
    for place, (mark, strategy) in enumerate(zip(drawing.MARKS, _AS_LINES, strict=False)):
        totals = [np.cumsum(each.delays_s(MAIN, strategy)) for each in samples]
        count, every = len(totals[0]), max(len(totals[0]) // 5, 1)
        axes.plot(
            np.arange(1, count + 1),
            np.mean(totals, axis=0) / 1000,
            **mark.as_line(),
            # Apart, so that lines on each other are seen to be several.
            markevery=(place * every // len(_AS_LINES), every),
            label=strategy,
        )
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("round")
    axes.set_ylabel("total delay [1,000 s]")
    axes.set_title(f"(a) {MAIN}")


def _draw_delays(axes: Axes, samples: Sequence[Sample]) -> None:
    for mark, places, world in zip(_WORLDS, _PLACES, WORLDS, strict=False):
        found = [cut(samples, world, dssra(weight), "random") for weight in WEIGHTS]
        _with_bars(axes, places[:-1], [_negative(each) for each in found], mark, world)
        last = _negative(cut(samples, world, "delay-only", "random"))
        _with_bars(axes, places[-1:], [last], mark, None)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks([*WEIGHTS, _BEYOND], [*map("{:g}".format, WEIGHTS), "delay-\nonly"])
    axes.set_ylabel("total delay against random [%]")
    axes.set_title("(b) delay")


def _draw_shares(axes: Axes, samples: Sequence[Sample]) -> None:
    for mark, places, world in zip(_WORLDS, _PLACES, WORLDS, strict=False):
        ends = [shares(samples, world, dssra(weight)) for weight in WEIGHTS]
        for intervals in zip(*ends, strict=True):
            _with_bars(axes, places[:-1], intervals, mark, None)
    axes.set_ylim(0, 100)
    axes.set_ylabel("rounds of a unit [%]")
    axes.set_title("(c) least and most scheduled unit")


def _draw_queues(axes: Axes, samples: Sequence[Sample]) -> None:
    for mark, places, world in zip(_WORLDS, _PLACES, WORLDS, strict=False):
        late = [
            over_seeds([each.queues(world, dssra(weight))[1] for each in samples])
            for weight in WEIGHTS
        ]
        _with_bars(axes, places[:-1], late, mark, None)
    axes.set_yscale("log")
    axes.set_ylabel("largest queue")
    axes.set_title("(d) mean of the last quarter of the rounds")


def _with_bars(
    axes: Axes,
    places: Sequence[float],
    intervals: Sequence[Interval],
    mark: drawing.Mark,
    label: str | None,
) -> None:
    axes.plot(places, [each.mean for each in intervals], **mark.as_line(), label=label)
    drawing.error_bars(axes, places, intervals)


def _negative(interval: Interval) -> Interval:
    """A cut as a difference."""
    if interval.low is None or interval.high is None:
        return Interval(-interval.mean, None, None)
    return Interval(-interval.mean, -interval.high, -interval.low)
