"""Fig. 4: a batch's time when the blocks are split evenly over S devices, over S and m.

Devices that are alike, then drawn ones of which the S fastest are taken. Limits of memory and
energy are left out, which would only hide a part of the picture.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from collapipe.reproduction import drawing
from collapipe.reproduction.figure import Cell, Finding, Ours, PaperFigure, Row, above
from collapipe.reproduction.paper_world import (
    BATCH_SIZE,
    TRANSFORMER_BLOCKS,
    paper_presets,
    settings,
)
from collapipe.runs.evidence import over_seeds, share_over_seeds
from collapipe.state import DeviceProfile
from optim.latency import pipeline_latency
from optim.partition.baselines import even_blocks
from optim.problem import Floats

CLUSTERS = 60  # drawn for each seed
_NEARLY_ALWAYS = 90  # %


def latencies(devices: Sequence[DeviceProfile]) -> Floats:
    """Seconds of a batch on the S fastest devices with m micro-batches, [S, m] from 1."""
    fastest = tuple(sorted(devices, key=lambda device: device.time.compute(1, 1.0)))
    most = min(len(devices), TRANSFORMER_BLOCKS)
    seconds = np.empty((most, BATCH_SIZE))
    for place, m in np.ndindex(seconds.shape):
        chosen, blocks = fastest[: place + 1], even_blocks(TRANSFORMER_BLOCKS, place + 1)
        seconds[place, m] = pipeline_latency(chosen, blocks, BATCH_SIZE, m + 1, "bound")
    return seconds


def best(seconds: Floats) -> tuple[int, int]:
    """S and m of the least latency in [S, m]."""
    place, m = np.unravel_index(seconds.argmin(), seconds.shape)
    return int(place) + 1, int(m) + 1


@functools.cache
def _alike() -> Floats:
    """Latencies [S, m] of K devices in the middle of all ranges of the preset."""
    preset = paper_presets().cluster
    ranges = ("relative_speed", "flops_per_s", "d2d_power_w")
    middles: dict[str, Any] = {name: (sum(getattr(preset, name)) / 2,) * 2 for name in ranges}
    alike = dataclasses.replace(preset, **middles)
    return latencies(dataclasses.replace(paper_presets(), cluster=alike).devices(0))


def _compute(seed: int) -> Floats:
    """Latencies of each drawn cluster, [cluster, S, m]."""
    presets = paper_presets()
    return np.array([latencies(presets.devices(seed, number)) for number in range(CLUSTERS)])


def _rows(seed: int, drawn: Floats) -> Iterator[Row]:
    tables: list[tuple[str, Cell, Floats]] = [("drawn", seed, drawn.mean(axis=0))]
    if seed == 0:  # these are the same for all seeds
        tables.insert(0, ("alike", "", _alike()))
    for devices, number, seconds in tables:
        for (place, m), value in np.ndenumerate(seconds):
            yield devices, number, place + 1, m + 1, float(value)


def _findings(drawn: Sequence[Floats]) -> Iterator[Finding]:
    for axis, name, most in ((1, "m", BATCH_SIZE), (0, "S", drawn[0].shape[1])):
        share = share_over_seeds(
            100 * sum(1 < best(cluster)[axis] < most for cluster in each) / len(each)
            for each in drawn
        )
        text = f"drawn clusters whose best {name} lies inside 1 < {name} < {most}"
        paper = f"there is always an optimal {name}"
        yield above(text, paper, share, "%", _NEARLY_ALWAYS, or_equal=True)
    means = [each.mean(axis=0) for each in drawn]
    for devices, tables in (("alike devices", [_alike()]), ("mean of drawn clusters", means)):
        segments, micro_batches = zip(*map(best, tables), strict=True)
        yield Finding(f"{devices}: best S", over_seeds(segments), "devices")
        yield Finding(f"{devices}: best m", over_seeds(micro_batches), "micro-batches")
        least = over_seeds(float(each.min()) for each in tables)
        yield Finding(f"{devices}: least latency", least, "s")


def _draw(drawn: Sequence[Floats], _: Ours) -> Figure:
    figure, (left, right) = drawing.panels(3.4, 2, sharey=True)
    means = [each.mean(axis=0) for each in drawn]
    for axes, tables, title in (
        (left, [_alike()], "(a) devices that are alike"),
        (right, means, "(b) drawn devices, the S fastest, mean"),
    ):
        m, by_segments = range(1, BATCH_SIZE + 1), enumerate(np.swapaxes(tables, 0, 1), start=1)
        series = {f"S={s}": (m, drawing.over_places(seconds)) for s, seconds in by_segments}
        drawing.draw_lines(axes, series, markevery=[0, 1, 3, 7, 15, 31, 63])
        mean = np.mean(tables, axis=0)
        (segments, least), least_s = best(mean), float(mean.min())
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
