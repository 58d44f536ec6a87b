"""Fig. 4: a batch's time over S and m, if the blocks are split evenly over S devices.

The paper splits evenly, S = L/δ, so S is 1, 2, 3 or 6; other values of S are computed too. Devices
are equal in the first part, and the S fastest of drawn ones in the second. Limits of memory and
energy are left out, because they would hide part of the picture.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from collapipe.runs.evidence import Interval, over_seeds
from collapipe.state import DeviceProfile
from optim.partition.baselines import even_blocks
from optim.partition.single_point import split_latency
from optim.problem import ClusterProblem, Floats
from reproduction import drawing
from reproduction.figure import Cell, Finding, Ours, PaperFigure, Row, above, share_over_seeds
from reproduction.paper_world import (
    BATCH_SIZE,
    TRANSFORMER_BLOCKS,
    narrowed,
    paper_presets,
    settings,
)

CLUSTERS = 60  # drawn for each seed
SEGMENTS = (1, 2, 3, 6)  # the paper's S
_EVERY = range(1, TRANSFORMER_BLOCKS + 1)
_NEARLY_ALWAYS = 90  # %


def latencies(devices: Sequence[DeviceProfile]) -> Floats:
    """Return seconds of a batch on the S fastest devices with m micro-batches, [S, m] from 1."""
    fastest = tuple(sorted(devices, key=lambda device: device.time.compute(1, 1.0)))
    most = min(len(devices), TRANSFORMER_BLOCKS)
    seconds = np.empty((most, BATCH_SIZE))
    for place, m in np.ndindex(seconds.shape):
        chosen, blocks = fastest[: place + 1], even_blocks(TRANSFORMER_BLOCKS, place + 1)
        problem = ClusterProblem(chosen, TRANSFORMER_BLOCKS, BATCH_SIZE, BATCH_SIZE, "bound")
        seconds[place, m] = split_latency(problem, blocks, m + 1)
    return seconds


def best(seconds: Floats, among: Sequence[int] = SEGMENTS) -> tuple[int, int]:
    """Return S, one of ``among``, and m of the least latency in [S, m]."""
    chosen = seconds[np.array(among) - 1]
    place, m = np.unravel_index(chosen.argmin(), chosen.shape)
    return among[int(place)], int(m) + 1


@functools.cache
def _equal_devices() -> Floats:
    """Return latencies [S, m] of K equal devices with the preset's mean values."""
    return latencies(narrowed(0.0).devices(0))


def _compute(seed: int) -> Floats:
    """Return latencies of each drawn cluster, [cluster, S, m]."""
    presets = paper_presets()
    return np.array([latencies(presets.devices(seed, number)) for number in range(CLUSTERS)])


def _rows(seed: int, drawn: Floats) -> Iterator[Row]:
    tables: list[tuple[str, Cell, Floats]] = [("drawn", seed, drawn.mean(axis=0))]
    if seed == 0:  # these are the same for all seeds
        tables.insert(0, ("alike", "", _equal_devices()))
    for devices, number, seconds in tables:
        for (place, m), value in np.ndenumerate(seconds):
            yield devices, number, place + 1, m + 1, float(value)


def _findings(drawn: Sequence[Floats]) -> Iterator[Finding]:
    for axis, name, most in ((1, "m", BATCH_SIZE), (0, "S", TRANSFORMER_BLOCKS)):
        text = f"drawn clusters whose best {name} lies inside 1 < {name} < {most}"
        paper, share = f"there is always an optimal {name}", _inside(drawn, axis, most, SEGMENTS)
        yield above(text, paper, share, "%", _NEARLY_ALWAYS, or_equal=True)
        yield Finding(f"{text}, every S", _inside(drawn, axis, most, _EVERY), "%")
    for segments in SEGMENTS:
        percents = (100 * float(np.mean([best(c)[0] == segments for c in each])) for each in drawn)
        yield Finding(f"drawn clusters whose best S is {segments}", share_over_seeds(percents), "%")
    means = [each.mean(axis=0) for each in drawn]
    for devices, tables in (
        ("alike devices", [_equal_devices()]),
        ("mean of drawn clusters", means),
    ):
        for among, what in ((SEGMENTS, ""), (_EVERY, ", every S")):
            chosen, micro_batches = zip(*(best(each, among) for each in tables), strict=True)
            yield Finding(f"{devices}: best S{what}", over_seeds(chosen), "devices")
            yield Finding(f"{devices}: best m{what}", over_seeds(micro_batches), "micro-batches")
        least = over_seeds(float(each.min()) for each in tables)
        yield Finding(f"{devices}: least latency, every S", least, "s")


def _inside(drawn: Sequence[Floats], axis: int, most: int, among: Sequence[int]) -> Interval:
    """Return how many clusters (%) have an optimum between the ends of S (axis 0) or m (axis 1)."""
    return share_over_seeds(
        100 * sum(1 < best(cluster, among)[axis] < most for cluster in each) / len(each)
        for each in drawn
    )


def _draw(drawn: Sequence[Floats], _: Ours) -> Figure:
    figure, (left, right) = drawing.panels(3.4, 2, sharey=True)
    means = [each.mean(axis=0) for each in drawn]
    for axes, tables, title in (
        (left, [_equal_devices()], "(a) devices that are alike"),
        (right, means, "(b) drawn devices, the S fastest, mean"),
    ):
        m, by_segments = range(1, BATCH_SIZE + 1), np.swapaxes(tables, 0, 1)
        series = {f"S={s}": (m, drawing.over_places(by_segments[s - 1])) for s in SEGMENTS}
        drawing.draw_lines(axes, series, markevery=[0, 1, 3, 7, 15, 31, 63])
        mean = np.mean(tables, axis=0)
        segments, least = best(mean)
        least_s = float(mean[segments - 1, least - 1])
        star: dict[str, Any] = {"marker": "*", "markersize": 13, "mfc": "white", "mec": "black"}
        axes.plot(least, least_s, linestyle="none", zorder=5, label="optimum", **star)
        text = f"S={segments}, m={least}: {least_s:.0f} s"
        drawing.annotate(axes, text, (least, least_s), -16)
        axes.set_xscale("log", base=2)
        axes.set_xticks(2 ** np.arange(7), [str(2**power) for power in range(7)])
        axes.set(ylim=(0, None), xlabel="micro-batches m", title=title)
    left.set_ylabel("time of a batch [s]")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


_COLUMNS = ("devices", "seed", "num_segments", "num_micro_batches", "latency_s")
_SETTINGS = settings(TRANSFORMER_BLOCKS, clusters_per_seed=CLUSTERS)
FIGURE = PaperFigure("fig04", _COLUMNS, _compute, _rows, _findings, _draw, _SETTINGS)
