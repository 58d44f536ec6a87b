"""Figs. 7 and 8: accumulated time of CollaPipe and other methods on the same clusters.

N clusters are drawn anew in every round. A round's time is the mean of its clusters' times, on
devices only and with uploads. Uploads of activations overlap with the pipeline.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from collapipe.runs.evidence import over_seeds
from optim.latency import batch_s
from optim.problem import Floats
from optim.round.channel import links, power_limits, upload_time
from reproduction import drawing
from reproduction.figure import Finding, Ours, PaperFigure, Row, near, reduction, share_over_seeds
from reproduction.paper_world import (
    BERT_BLOCKS,
    TRANSFORMER_BLOCKS,
    draw_cluster,
    paper_presets,
    settings,
    solve,
    stream,
)

ROUNDS = 20
CLUSTERS = 3  # N

LABELS: Mapping[str, str] = {
    "exact": "CollaPipe",
    "vanilla_fl": "VanillaFL",
    "pipeline": "PipeLine",
    "titanic": "TITANIC",
    "no_segment_scheduling": "CollaPipe w/o SS",
    "gpipe": "GPipe, even split",
    "pipedream": "PipeDream, FTPipeHD",
    "pipeedge": "PipeEdge",
}
"""Methods by solver, ours first. "w/o SS" is the paper's "without segment scheduling"."""
OWN, *OTHERS = LABELS
_BLIND = "no_segment_scheduling"
_AS_LINES = (OWN, "vanilla_fl", "pipeline", "titanic", _BLIND)
_PAPER = {"vanilla_fl": 15.09, "titanic": 18.94, "pipeline": 40.55}


@dataclass(frozen=True, slots=True)
class MethodTimes:
    """A method's rounds; seconds are means of each round's clusters."""

    devices_s: Floats
    slowest_s: Floats  # the largest of the clusters' times on devices
    uploads_s: Floats  # additional seconds for uploads
    activations_s: Floats  # seconds to send only a batch's activations
    adapters_s: Floats  # seconds to send adapters
    over_limits: int  # how many clusters exceed memory or energy


Times = Mapping[str, MethodTimes]
"""A seed's rounds by method."""
_DEVICES, _UPLOADS = "on devices", "with uploads"
_SLOWEST = "on devices, the slowest cluster of each round"
_TOTALS: Mapping[str, Callable[[MethodTimes], float]] = {
    _DEVICES: lambda times: float(times.devices_s.sum()),
    _SLOWEST: lambda times: float(times.slowest_s.sum()),
    _UPLOADS: lambda times: float(times.devices_s.sum()) + float(times.uploads_s.sum()),
}
"""Functions that give the seconds of all rounds, by the counted times."""


def _compute(seed: int, num_blocks: int) -> Times:
    activations, adapters = np.array([_uploads(seed, number) for number in range(ROUNDS)]).swapaxes(
        0, 1
    )
    found = {}
    for name in LABELS:
        seconds, totals, over_limits = (*np.empty((2, ROUNDS, CLUSTERS)), 0)
        for place in np.ndindex(ROUNDS, CLUSTERS):
            cluster = draw_cluster(num_blocks, seed, *place)
            # Replicas send no activations; separate models send no adapters.
            sent_s = float(activations[place]) * (name != "vanilla_fl")
            for activation_s, times in ((0.0, seconds), (sent_s, totals)):
                problem, rng = (
                    replace(cluster, activation_s=(activation_s,)),
                    stream(seed, name, *place),
                )
                solution, exceeds = solve(name, problem, rng, unlimited=name != OWN)
                times[place] = batch_s(solution.best, activation_s)
            over_limits += exceeds
        devices = seconds.mean(axis=1)
        uploads = totals.mean(axis=1) + adapters.mean(axis=1) * (name != "pipeline") - devices
        found[name] = MethodTimes(
            *(devices, seconds.max(axis=1), uploads),
            *(activations.mean(axis=1), adapters.mean(axis=1)),
            over_limits,
        )
    return found


def _uploads(seed: int, round_number: int) -> tuple[Floats, Floats]:
    """Return seconds to upload each unit's activations of a batch, and its adapters.

    Unit n has channel n.
    """
    channels, uplinks = paper_presets().radio(seed, CLUSTERS, round_number)
    pairs = links(uplinks, channels, "none", "adapters").at(0)
    own, adapters = np.diagonal(pairs.rates(power_limits(pairs))), pairs.model_bits[:, 0]
    activations = upload_time(pairs.upload_bits[:, 0] - adapters, own)
    return activations, upload_time(adapters, own)


def _rows(seed: int, times: Times) -> Iterator[Row]:
    for method, each in times.items():
        totals = each.devices_s.cumsum(), (each.devices_s + each.uploads_s).cumsum()
        columns = np.array([each.devices_s, each.slowest_s, each.uploads_s, *totals])
        for number, values in enumerate(columns.T.tolist(), start=1):
            yield seed, method, number, *values


def _findings(seeds: Sequence[Times]) -> Iterator[Finding]:
    for counted in (_DEVICES, _UPLOADS):
        total_s = _TOTALS[counted]
        for other, paper in _PAPER.items():
            text = f"reduction against {LABELS[other]}, {counted}"
            yield near(text, paper, reduction(seeds, OWN, other, total_s), "%")
        increase = -reduction(seeds, _BLIND, OWN, total_s)
        yield near(f"increase without segment scheduling, {counted}", 22.45, increase, "%")
        ours = reduction(seeds, "vanilla_fl", "pipeline", total_s)
        yield near(f"VanillaFL's reduction against PipeLine, {counted}", 29.98, ours, "%")
    for counted in (_DEVICES, _UPLOADS):
        for name, label in LABELS.items():
            total = over_seeds(_TOTALS[counted](each[name]) for each in seeds)
            yield Finding(f"{label}: total, {counted}", total, "s")
    for counted, total_s in _TOTALS.items():
        for other in OTHERS:
            if counted == _SLOWEST or other not in _PAPER:
                text = f"reduction against {LABELS[other]}, {counted}"
                yield Finding(text, reduction(seeds, OWN, other, total_s), "%")
    yield Finding(
        "reduction against VanillaFL, with uploads, its devices' adapters one after another",
        over_seeds(100 * (1 - _TOTALS[_UPLOADS](each[OWN]) / _one_by_one(each)) for each in seeds),
        "%",
    )
    most_w = paper_presets().channel.max_power_w
    for what, sent_s in (
        ("activations of a batch", [each[OWN].activations_s for each in seeds]),
        ("adapters", [each[OWN].adapters_s for each in seeds]),
    ):
        joules = over_seeds(most_w * float(each.mean()) for each in sent_s)
        yield Finding(f"C8: joules of a unit's {what} at the largest power, mean", joules, "J")
    for other in OTHERS:
        shares = [100 * each[other].over_limits / (ROUNDS * CLUSTERS) for each in seeds]
        text = f"{LABELS[other]}: clusters whose memory or energy it exceeds"
        yield Finding(text, share_over_seeds(shares), "%")


def _one_by_one(times: Times) -> float:
    """Return VanillaFL's total if all devices of a cluster send adapters on its channel."""
    devices, vanilla = paper_presets().cluster.num_devices, times["vanilla_fl"]
    return _TOTALS[_DEVICES](vanilla) + devices * float(vanilla.adapters_s.sum())


def _draw(seeds: Sequence[Times], ours: Ours) -> Figure:
    """Draw the paper's methods over rounds, and all methods' totals with uploads."""
    figure, (left, right) = drawing.panels(3.8, 2, width_ratios=[1, 1.15])
    rounds = range(1, len(seeds[0][OWN].devices_s) + 1)
    series = {}
    for method in _AS_LINES:
        accumulated = [each[method].devices_s.cumsum() for each in seeds]
        series[LABELS[method]] = (rounds, drawing.over_places(accumulated))
    drawing.draw_lines(left, series)
    left.set(xlim=(0, None), ylim=(0, None), title="(a) on devices")
    left.set(xlabel="round", ylabel="accumulated time [s]")
    labels, places = LABELS.values(), range(len(LABELS))
    totals = [ours[f"{label}: total, {_UPLOADS}"] for label in labels]
    devices = [ours[f"{label}: total, {_DEVICES}"].mean for label in labels]
    uploads = [total.mean - own for total, own in zip(totals, devices, strict=True)]
    right.barh(places, devices, 0.7, **drawing.MARKS[0].as_bar(), label="on devices")
    right.barh(places, uploads, 0.7, devices, **drawing.MARKS[1].as_bar(), label="uploads")
    drawing.error_bars(right, places, totals, level=True)
    right.set_yticks(places, labels)
    right.invert_yaxis()
    right.set(xlim=(0, None), xlabel=f"total of {len(rounds)} rounds [s]")
    right.set_title("(b) with uploads")
    for axes in (left, right):
        drawing.legend_below(axes, 2)
    return figure


_COLUMNS = (
    *("seed", "method", "round", "devices_s", "slowest_s", "upload_s"),
    *("accumulated_devices_s", "accumulated_total_s"),
)


def _figure(name: str, num_blocks: int) -> PaperFigure[Times]:
    per_round = {"rounds": ROUNDS, "clusters_per_round": CLUSTERS, "local_steps": 1}
    options = settings(num_blocks, **per_round)
    compute = functools.partial(_compute, num_blocks=num_blocks)
    return PaperFigure(name, _COLUMNS, compute, _rows, _findings, _draw, options)


FIG07, FIG08 = _figure("fig07", TRANSFORMER_BLOCKS), _figure("fig08", BERT_BLOCKS)
