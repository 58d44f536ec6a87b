"""Figs. 7 and 8 with devices that differ less than in Table II: does any spread fit the paper?

Times are on devices, without uploads. "Without segment scheduling" is read in two ways: an even
split over S random devices, or over the S fastest. S and m are CollaPipe's.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure, SubFigure

from optim.partition.baselines import even_blocks
from optim.partition.single_point import split_latency
from optim.problem import ClusterProblem
from reproduction import drawing
from reproduction.figure import Cell, Finding, Ours, PaperFigure, Row, near, reduction
from reproduction.paper_world import (
    BATCH_SIZE,
    BERT_BLOCKS,
    TRANSFORMER_BLOCKS,
    draw_cluster,
    solve,
    stream,
)

CLUSTERS = 60  # of each seed, as many as Figs. 7 and 8 draw
SPREADS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of Table II's ranges
MODELS: Mapping[str, int] = {"Transformer": TRANSFORMER_BLOCKS, "BERT": BERT_BLOCKS}
OWN, RIVAL, EVEN, RANDOM, FASTEST = (
    *("exact", "vanilla_fl", "pipeline", "no_segment_scheduling"),
    "S fastest",
)
_SOLVERS = (OWN, RIVAL, "titanic", EVEN, RANDOM)
_PAPER_POSITION = 1.17  # position of the paper's figures on the axis of spreads
Key = tuple[str, float, str]  # model, spread, method
Seconds = Mapping[Key, float]
"""A seed's total by model, spread and method."""

_READINGS: Mapping[str, tuple[str, str, float]] = {
    "reduction against VanillaFL": (OWN, RIVAL, 15.09),
    "reduction against TITANIC": (OWN, "titanic", 18.94),
    "reduction against PipeLine": (OWN, EVEN, 40.55),
    "VanillaFL's reduction against PipeLine": (RIVAL, EVEN, 29.98),
    "increase on S random devices": (RANDOM, OWN, 22.45),
    "increase on the S fastest devices": (FASTEST, OWN, 22.45),
}
"""Reductions and increases of one method against another, with the paper's figure."""


def _compute(seed: int) -> Seconds:
    return {
        (model, spread, method): total
        for model, spread in itertools.product(MODELS, SPREADS)
        for method, total in _totals(seed, MODELS[model], spread).items()
    }


def _totals(seed: int, num_blocks: int, spread: float) -> dict[str, float]:
    """Return the seconds of every method, over the same clusters."""
    totals = dict.fromkeys((*_SOLVERS, FASTEST), 0.0)
    for number in range(CLUSTERS):
        cluster = draw_cluster(num_blocks, seed, number, spread=spread)
        for method in _SOLVERS:
            rng = stream(seed, method, number)
            best = solve(method, cluster, rng, unlimited=method != OWN)[0].best
            totals[method] += best.latency_s
            if method == OWN:
                sizes = best.num_segments, best.num_micro_batches
                totals[FASTEST] += even_on_fastest_s(cluster, *sizes)
    return totals


def even_on_fastest_s(cluster: ClusterProblem, segments: int, micro_batches: int) -> float:
    """Return seconds of a batch if blocks are split evenly over the S fastest devices."""
    fastest = sorted(cluster.devices, key=lambda device: device.time.compute(1, 1.0))[:segments]
    blocks = even_blocks(cluster.num_blocks, segments)
    return split_latency(replace(cluster, devices=tuple(fastest)), blocks, micro_batches)


def _rows(seed: int, seconds: Seconds) -> Iterator[Row]:
    yield from ((seed, *key, total) for key, total in seconds.items())


def _findings(seeds: Sequence[Seconds]) -> Iterator[Finding]:
    for (model, spread), reading in itertools.product(
        itertools.product(MODELS, SPREADS), _READINGS
    ):
        one, other, paper = _READINGS[reading]
        keys = (model, spread, one), (model, spread, other)
        ours = reduction(seeds, *keys, float)
        if reading.startswith("increase"):
            ours = -ours
        text = f"{reading}; {model}, spread {spread:g}"
        claim = near(text, paper, ours, "%")
        # The paper has no spreads: claims are about both ends, equal devices and Table II.
        yield claim if spread in (SPREADS[0], SPREADS[-1]) else Finding(text, ours, "%")


def _draw(_: Sequence[Seconds], ours: Ours) -> Figure:
    """Draw a column per model: reductions above, increases below, with the paper's figures."""
    figure = Figure((drawing.WIDTH_IN, 6.4), layout="constrained")
    above, below = figure.subfigures(2, squeeze=False, height_ratios=[1.15, 1])[:, 0]
    _draw_row(above, [*_READINGS][:4], "reduction [%]", ours)
    _draw_row(below, [*_READINGS][4:], "increase without\nsegment scheduling [%]", ours)
    return figure


def _draw_row(figure: SubFigure, readings: Sequence[str], label: str, ours: Ours) -> None:
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, model in zip(panels, MODELS, strict=True):
        series = {
            each: (SPREADS, [ours[f"{each}; {model}, spread {s:g}"] for s in SPREADS])
            for each in readings
        }
        drawing.draw_lines(axes, series, markevery=1)
        for mark, each in zip(drawing.MARKS, readings, strict=False):
            axes.plot(
                _PAPER_POSITION, _READINGS[each][2], mark.marker, color=mark.colour, mfc="white"
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks([*SPREADS, _PAPER_POSITION], [*map("{:g}".format, SPREADS), "paper"])
        axes.set(xlabel="spread of devices, of Table II's", title=model)
    panels[0].set_ylabel(label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


_COLUMNS = ("seed", "model", "spread", "method", "total_s")
_SETTINGS = dict[str, Cell](clusters_per_seed=CLUSTERS, batch_size=BATCH_SIZE, latency="bound")
FIGURE = PaperFigure("spreads", _COLUMNS, _compute, _rows, _findings, _draw, _SETTINGS)
