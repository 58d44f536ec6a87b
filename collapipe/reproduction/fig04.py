"""Fig. 4: what a batch takes when the blocks are split evenly over S devices, over S and m."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from collapipe.devices.presets import Range
from collapipe.reproduction import drawing
from collapipe.reproduction.worlds import BATCH_SIZE, TRANSFORMER_BLOCKS, paper_world
from collapipe.runs.evidence import (
    Cell,
    Claim,
    Evidence,
    Finding,
    at_least,
    over_seeds,
    share_over_seeds,
)
from collapipe.state import DeviceProfile
from optim.latency import pipeline_latency
from optim.partition.baselines import even_blocks

CLUSTERS = 60  # drawn for each seed
_NEARLY_ALWAYS = 90  # %
Floats = NDArray[np.float64]


def evidence(seeds: Sequence[int]) -> Evidence:
    """Alike devices, then drawn ones of which the S fastest are taken; no limits of memory or
    energy, which would only hide a part of the picture."""
    alike = latencies(_nominal_devices())
    drawn = {seed: _drawn(seed) for seed in seeds}
    mean = np.mean([each.mean(axis=0) for each in drawn.values()], axis=0)
    return Evidence(
        columns=("devices", "seed", "num_segments", "num_micro_batches", "latency_s"),
        rows=[
            *_rows("alike", "", alike),
            *(row for s, each in drawn.items() for row in _rows("drawn", s, each.mean(axis=0))),
        ],
        claims=_claims(list(drawn.values())),
        findings=_findings(alike, list(drawn.values())),
        settings={
            "num_blocks": TRANSFORMER_BLOCKS,
            "batch_size": BATCH_SIZE,
            "clusters_per_seed": CLUSTERS,
            "latency": "bound",
        },
        picture=_picture(alike, mean),
    )


def latencies(devices: Sequence[DeviceProfile]) -> Floats:
    """Seconds of a batch on the S fastest devices with m micro-batches, [S, m] from 1."""
    fastest = tuple(sorted(devices, key=lambda device: device.time.compute(1, 1.0)))
    most = min(len(devices), TRANSFORMER_BLOCKS)
    return np.array([_over_m(fastest[:count]) for count in range(1, most + 1)])


def _over_m(devices: tuple[DeviceProfile, ...]) -> list[float]:
    blocks = even_blocks(TRANSFORMER_BLOCKS, len(devices))
    return [
        pipeline_latency(devices, blocks, BATCH_SIZE, m, "bound") for m in range(1, BATCH_SIZE + 1)
    ]


def _nominal_devices() -> tuple[DeviceProfile, ...]:
    """K devices in the middle of all ranges of the preset."""
    preset = paper_world().cluster
    middle = dataclasses.replace(
        preset,
        relative_speed=_middle(preset.relative_speed),
        flops_per_s=_middle(preset.flops_per_s),
        d2d_power_w=_middle(preset.d2d_power_w),
    )
    return dataclasses.replace(paper_world(), cluster=middle).devices(0)


def _middle(ends: Range) -> Range:
    middle = sum(ends) / 2
    return middle, middle


def _drawn(seed: int) -> Floats:
    """Of each cluster, [cluster, S, m]."""
    world = paper_world()
    return np.array([latencies(world.devices(seed, number)) for number in range(CLUSTERS)])


def _rows(devices: str, seed: Cell, seconds: Floats) -> list[tuple[Cell, ...]]:
    return [
        (devices, seed, place + 1, m + 1, float(value))
        for (place, m), value in np.ndenumerate(seconds)
    ]


def best(seconds: Floats) -> tuple[int, int]:
    """S and m of the least latency in [S, m]."""
    place, m = np.unravel_index(seconds.argmin(), seconds.shape)
    return int(place) + 1, int(m) + 1


def _claims(drawn: Sequence[Floats]) -> tuple[Claim, ...]:
    most = drawn[0].shape[1]
    inside_m = [_share([1 < best(one)[1] < BATCH_SIZE for one in each]) for each in drawn]
    inside_s = [_share([1 < best(one)[0] < most for one in each]) for each in drawn]
    return (
        at_least(
            f"drawn clusters whose best m lies inside 1 < m < {BATCH_SIZE}",
            "there is always an optimal m",
            share_over_seeds(inside_m),
            "%",
            _NEARLY_ALWAYS,
        ),
        at_least(
            f"drawn clusters whose best S lies inside 1 < S < {most}",
            "there is always an optimal S",
            share_over_seeds(inside_s),
            "%",
            _NEARLY_ALWAYS,
        ),
    )


def _findings(alike: Floats, drawn: Sequence[Floats]) -> tuple[Finding, ...]:
    segments, micro_batches = best(alike)
    means = [best(each.mean(axis=0)) for each in drawn]
    return (
        Finding("alike devices: best S", over_seeds([segments]), "devices"),
        Finding("alike devices: best m", over_seeds([micro_batches]), "micro-batches"),
        Finding("alike devices: least latency", over_seeds([float(alike.min())]), "s"),
        Finding(
            "drawn clusters: S of the least mean latency",
            over_seeds([float(pair[0]) for pair in means]),
            "devices",
        ),
        Finding(
            "drawn clusters: m of the least mean latency",
            over_seeds([float(pair[1]) for pair in means]),
            "micro-batches",
        ),
        Finding(
            "drawn clusters: least mean latency",
            over_seeds([float(each.mean(axis=0).min()) for each in drawn]),
            "s",
        ),
    )


def _share(is_so: Sequence[bool]) -> float:
    return 100 * sum(is_so) / len(is_so)


def _picture(alike: Floats, drawn: Floats) -> Figure:
    figure, (left, right) = drawing.panels(3.4, 2, sharey=True)
    _draw(left, alike, "(a) devices that are alike")
    _draw(right, drawn, "(b) drawn devices, the S fastest, mean")
    left.set_ylabel("time of a batch [s]")
    drawing.legend_below(figure, (left,), 7)
    return figure


def _draw(axes: Axes, seconds: Floats, title: str) -> None:
    m = np.arange(1, seconds.shape[1] + 1)
    for place, (mark, row) in enumerate(zip(drawing.MARKS, seconds, strict=False)):
        axes.plot(
            m, row, **mark.as_line(), markevery=[0, 1, 3, 7, 15, 31, 63], label=f"S={place + 1}"
        )
    place, least = best(seconds)
    axes.plot(
        least,
        seconds.min(),
        linestyle="none",
        marker="*",
        markersize=13,
        markerfacecolor="white",
        markeredgecolor="black",
        zorder=5,
        label="optimum",
    )
    axes.annotate(
        f"S={place}, m={least}: {seconds.min():.0f} s",
        (least, seconds.min()),
        xytext=(0, -16),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(2 ** np.arange(7), [str(2**power) for power in range(7)])
    axes.set_ylim(0)
    axes.set_xlabel("micro-batches m")
    axes.set_title(title)
