"""Fig. 5: the best S and m of clusters with uneven devices, and the cost of an even split.

The paper's assumptions about these optima are checked too: chunks tend to be equal (assumption 4),
blocks per device (Table III), and energy per device (C9, C9').
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from collapipe.runs.evidence import Interval, over_seeds
from optim.latency import block_caps
from optim.problem import ClusterProblem, Partition
from reproduction import drawing
from reproduction.figure import Finding, Ours, PaperFigure, Row, above, near, share_over_seeds
from reproduction.paper_world import BERT_BLOCKS, draw_cluster, settings, solve, stream

CLUSTERS = 200  # drawn for each seed, of which the paper shows three
_PAPER = {5: 14, 4: 11, 3: 9}  # m for each S
_SHOWN = 4


class ClusterOptimum(NamedTuple):
    """The exact optimum of a cluster, and an even split over all devices at its best m."""

    num_segments: int
    num_micro_batches: int
    latency_s: float
    even_micro_batches: int
    even_latency_s: float
    chunk_ratio: float  # largest over smallest chunk of the optimum's devices
    most_blocks: int  # on a device
    most_energy_j: float  # of a device for a whole batch
    affords_batch: int  # whether any split keeps every device's energy for a whole batch


Clusters = Sequence[ClusterOptimum]


def _compute(seed: int) -> Clusters:
    return [_solve(seed, number) for number in range(CLUSTERS)]


def _solve(seed: int, number: int) -> ClusterOptimum:
    cluster, rng = draw_cluster(BERT_BLOCKS, seed, number), stream(seed, "solver", number)
    best, even = solve("exact", cluster, rng)[0].best, solve("gpipe", cluster, rng, True)[0].best
    optimum = best.num_segments, best.num_micro_batches, best.latency_s
    split, affords = _chunks_and_energy(cluster, best), int(_affords_batch(cluster))
    return ClusterOptimum(*optimum, even.num_micro_batches, even.latency_s, *split, affords)


def _chunks_and_energy(cluster: ClusterProblem, best: Partition) -> tuple[float, int, float]:
    """Return largest over smallest chunk, and the most blocks and joules of a device per batch."""
    size = cluster.batch_size / best.num_micro_batches
    held = [pair for pair in zip(cluster.devices, best.blocks, strict=True) if pair[1]]
    chunks = [device.time.chunk(blocks, size) for device, blocks in held]
    joules = [device.energy.law.chunk(blocks, size) for device, blocks in held if device.energy]
    return max(chunks) / min(chunks), max(best.blocks), best.num_micro_batches * max(joules)


def _affords_batch(cluster: ClusterProblem) -> bool:
    """Whether any split is feasible if E_k^max limits all micro-batches of a batch (C9)."""
    devices = tuple(
        replace(device, energy=device.energy and replace(device.energy, scope="batch"))
        for device in cluster.devices
    )
    caps = block_caps(replace(cluster, devices=devices))
    return bool(caps.sum(axis=1).max() >= cluster.num_blocks)


def _rows(seed: int, clusters: Clusters) -> Iterator[Row]:
    for number, cluster in enumerate(clusters):
        yield seed, number, *cluster


def _findings(seeds: Sequence[Clusters]) -> Iterator[Finding]:
    text, paper = "clusters whose best S is 3, 4 or 5", "S = {5, 4, 3} in three clusters"
    yield above(text, paper, _shares(seeds, *_PAPER), "%", 50, or_equal=True)
    for s in (*_PAPER, *(s for s in _segments(seeds) if s not in _PAPER)):
        chosen = [found for each in seeds if (found := _micro_batches(each, s))]
        if chosen:  # S is best somewhere
            medians = over_seeds(float(np.median(found)) for found in chosen)
            text, unit = f"median of the best m where S = {s} is best", "micro-batches"
            claim = near(text, _PAPER[s], medians, unit, 1) if s in _PAPER else None
            yield claim or Finding(text, medians, unit)
    increase = over_seeds(
        100 * (sum(c.even_latency_s for c in each) / sum(c.latency_s for c in each) - 1)
        for each in seeds
    )
    text = "even split over all devices: increase of the mean latency"
    yield above(text, "increases significantly", increase, "%", 0, or_equal=True)
    for s in _segments(seeds):
        yield Finding(f"clusters whose best S is {s}", _shares(seeds, s), "%")
    mean = over_seeds(float(np.mean([c.latency_s for c in each])) for each in seeds)
    yield Finding("mean latency of the optimum", mean, "s")
    yield from _assumed(seeds)


def _assumed(seeds: Sequence[Clusters]) -> Iterator[Finding]:
    """Yield findings on the paper's assumptions about its optima, with Table II's memory."""
    medians = over_seeds(
        100 * (float(np.median([c.chunk_ratio for c in each])) - 1) for each in seeds
    )
    text = "assumption 4: largest chunk above the smallest, median of the optima"
    yield near(text, 0.0, medians, "%", 10)
    most = over_seeds(float(np.mean([c.most_blocks for c in each])) for each in seeds)
    yield Finding("Table III: blocks on the device that holds most, mean", most, "blocks")
    spent = over_seeds(float(np.mean([c.most_energy_j for c in each])) for each in seeds)
    yield Finding("C9: joules of a batch on the device that spends most, mean", spent, "J")
    able = share_over_seeds(100 * float(np.mean([c.affords_batch for c in each])) for each in seeds)
    text = "C9: clusters that some split fits, Table II's energy being for a whole batch"
    yield Finding(text, able, "%")


def _segments(seeds: Sequence[Clusters]) -> list[int]:
    return sorted({cluster.num_segments for each in seeds for cluster in each})


def _shares(seeds: Sequence[Clusters], *segments: int) -> Interval:
    """Return how many clusters have their optimum at each S."""
    found = [[cluster.num_segments in segments for cluster in each] for each in seeds]
    return share_over_seeds(100 * sum(each) / len(each) for each in found)


def _micro_batches(clusters: Clusters, segments: int) -> list[int]:
    return [each.num_micro_batches for each in clusters if each.num_segments == segments]


def _draw(seeds: Sequence[Clusters], ours: Ours) -> Figure:
    figure, axes = drawing.panels(3.1, 3, width_ratios=[1.75, 1, 1])
    segments, every = _segments(seeds), [cluster for each in seeds for cluster in each]
    _draw_clusters(axes[0], seeds[0][:_SHOWN])
    shares = [ours[f"clusters whose best S is {s}"] for s in segments]
    axes[1].bar(segments, [each.mean for each in shares], 0.7, **drawing.MARKS[0].as_bar())
    drawing.error_bars(axes[1], segments, shares)
    axes[1].set(ylim=(0, None), ylabel="share of clusters [%]", title="(b) all clusters: S")
    # Median and quartiles of m, with the paper's three pairs.
    quartiles = [np.percentile(_micro_batches(every, s), [25, 50, 75]) for s in segments]
    found = [Interval(median, low, high) for low, median, high in quartiles]
    colour = drawing.MARKS[0].colour
    drawing.error_bars(axes[2], segments, found, marker="o", color=colour, label="ours")
    axes[2].plot([*_PAPER], [*_PAPER.values()], "x", color="black", markersize=8, label="paper")
    axes[2].set_xlim(segments[0] - 0.5, segments[-1] + 0.5)
    axes[2].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[2].set(ylim=(0, 1.4 * np.max(quartiles)), ylabel="best m", title="(c) all clusters: m")
    axes[2].legend(loc="upper left")
    for each in axes[1:]:
        each.set(xticks=segments, xlabel="best S")
    return figure


def _draw_clusters(axes: Axes, clusters: Clusters) -> None:
    """Draw the optimum of each cluster, and the even split of the last one."""
    last, place = clusters[-1], len(clusters)
    bars = [(c.latency_s, c.num_segments, c.num_micro_batches) for c in clusters]
    bars.append((last.even_latency_s, 6, last.even_micro_batches))
    for number, (latency_s, segments, micro_batches) in enumerate(bars):
        mark = drawing.MARKS[number == place]
        label = {0: "optimum", place: "even split"}.get(number)
        axes.bar(number, latency_s, 0.8, **mark.as_bar(), label=label)
        drawing.annotate(axes, f"S={segments}\nm={micro_batches}", (number, latency_s), 2)
    axes.set_xticks(range(place + 1), [*map(str, range(1, place + 1)), str(place)])
    axes.set(xlabel="cluster", ylabel="time of a batch [s]", title="(a) the first four clusters")
    axes.set_ylim(0, 1.45 * max(latency_s for latency_s, _, _ in bars))
    axes.legend(loc="upper left")


_COLUMNS = ("seed", "cluster", *ClusterOptimum._fields)
_SETTINGS = settings(BERT_BLOCKS, clusters_per_seed=CLUSTERS)
FIGURE = PaperFigure("fig05", _COLUMNS, _compute, _rows, _findings, _draw, _SETTINGS)
