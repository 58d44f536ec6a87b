"""Fig. 5: the best S and m of clusters with uneven devices, and what an even split costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from collapipe.reproduction import drawing
from collapipe.reproduction.worlds import (
    BATCH_SIZE,
    BERT_BLOCKS,
    paper_world,
    problem,
    solved,
    solved_or_unlimited,
    stream,
)
from collapipe.runs.evidence import (
    Claim,
    Evidence,
    Finding,
    Interval,
    at_least,
    over_seeds,
    share_over_seeds,
    within_one,
)
from optim.solvers import cluster_solver

CLUSTERS = 200  # drawn for each seed
_PAPER = {5: 14, 4: 11, 3: 9}  # m for each S
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster: the exact optimum, and an even split over all devices at its best m."""

    num_segments: int
    num_micro_batches: int
    latency_s: float
    even_micro_batches: int
    even_latency_s: float


def evidence(seeds: Sequence[int]) -> Evidence:
    """Exact optima of many clusters, of which the paper shows three."""
    cases = {seed: [_case(seed, number) for number in range(CLUSTERS)] for seed in seeds}
    samples = list(cases.values())
    return Evidence(
        columns=(
            "seed",
            "cluster",
            "num_segments",
            "num_micro_batches",
            "latency_s",
            "even_micro_batches",
            "even_latency_s",
        ),
        rows=[
            (
                seed,
                number,
                case.num_segments,
                case.num_micro_batches,
                case.latency_s,
                case.even_micro_batches,
                case.even_latency_s,
            )
            for seed, drawn in cases.items()
            for number, case in enumerate(drawn)
        ],
        claims=_claims(samples),
        findings=_findings(samples),
        settings={
            "num_blocks": BERT_BLOCKS,
            "batch_size": BATCH_SIZE,
            "clusters_per_seed": CLUSTERS,
            "latency": "bound",
        },
        picture=_picture(samples),
    )


def _case(seed: int, number: int) -> Case:
    cluster = problem(paper_world().devices(seed, number), BERT_BLOCKS)
    rng = stream(seed, "solver", number)
    best = solved(cluster_solver("exact"), cluster, rng).best
    even = solved_or_unlimited(cluster_solver("gpipe"), cluster, rng)[0].best
    return Case(
        best.num_segments,
        best.num_micro_batches,
        best.latency_s,
        even.num_micro_batches,
        even.latency_s,
    )


def _claims(samples: Sequence[Sequence[Case]]) -> tuple[Claim, ...]:
    printed = [_share(cases, *_PAPER) for cases in samples]
    slower = [_increase(cases) for cases in samples]
    return (
        at_least(
            "clusters whose best S is 3, 4 or 5",
            "S = {5, 4, 3} in three clusters",
            share_over_seeds(printed),
            "%",
            50,
        ),
        *(
            within_one(f"median of the best m where S = {s} is best", m, medians, "micro-batches")
            for s, m in _PAPER.items()
            if (medians := _median(samples, s)) is not None
        ),
        at_least(
            "even split over all devices: increase of the mean latency",
            "increases significantly",
            over_seeds(slower),
            "%",
            0,
        ),
    )


def _findings(samples: Sequence[Sequence[Case]]) -> tuple[Finding, ...]:
    return (
        *(
            Finding(f"clusters whose best S is {s}", _shares(samples, s), "%")
            for s in _segments(samples)
        ),
        *(
            Finding(f"median of the best m where S = {s} is best", medians, "micro-batches")
            for s in _segments(samples)
            if (medians := _median(samples, s)) is not None
        ),
        Finding(
            "mean latency of the optimum",
            over_seeds([float(np.mean([case.latency_s for case in cases])) for cases in samples]),
            "s",
        ),
    )


def _segments(samples: Sequence[Sequence[Case]]) -> list[int]:
    return sorted({case.num_segments for cases in samples for case in cases})


def _share(cases: Sequence[Case], *segments: int) -> float:
    return 100 * sum(case.num_segments in segments for case in cases) / len(cases)


def _shares(samples: Sequence[Sequence[Case]], segments: int) -> Interval:
    return share_over_seeds([_share(cases, segments) for cases in samples])


def _micro_batches(cases: Sequence[Case], segments: int) -> list[int]:
    return [case.num_micro_batches for case in cases if case.num_segments == segments]


def _median(samples: Sequence[Sequence[Case]], segments: int) -> Interval | None:
    """Of the seeds' medians; None where S was best nowhere."""
    chosen = [found for cases in samples if (found := _micro_batches(cases, segments))]
    return over_seeds([float(np.median(found)) for found in chosen]) if chosen else None


def _increase(cases: Sequence[Case]) -> float:
    even = sum(case.even_latency_s for case in cases)
    return 100 * (even / sum(case.latency_s for case in cases) - 1)


def _picture(samples: Sequence[Sequence[Case]]) -> Figure:
    figure, axes = drawing.panels(3.1, 3, width_ratios=[1.75, 1, 1])
    _draw_clusters(axes[0], samples[0][:_SHOWN])
    _draw_shares(axes[1], samples)
    _draw_micro_batches(axes[2], samples)
    return figure


def _draw_clusters(axes: Axes, cases: Sequence[Case]) -> None:
    """The optimum of each, and of the last the even split beside it."""
    optimum, even = drawing.MARKS[2], drawing.MARKS[1]
    for number, case in enumerate(cases):
        label = "optimum" if number == 0 else None
        axes.bar(number, case.latency_s, 0.8, **optimum.as_bar(), label=label)
        _above(axes, number, case.latency_s, f"S={case.num_segments}\nm={case.num_micro_batches}")
    last, place = cases[-1], len(cases)
    axes.bar(place, last.even_latency_s, 0.8, **even.as_bar(), label="even split")
    _above(axes, place, last.even_latency_s, f"S=6\nm={last.even_micro_batches}")
    axes.set_xticks(range(place + 1), [*map(str, range(1, place + 1)), str(place)])
    axes.set_xlabel("cluster")
    axes.set_ylabel("time of a batch [s]")
    axes.set_ylim(0, 1.45 * max(last.even_latency_s, *(case.latency_s for case in cases)))
    axes.legend(loc="upper left")
    axes.set_title("(a) the first four clusters")


def _above(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(
        text,
        (place, height),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
    )


def _draw_shares(axes: Axes, samples: Sequence[Sequence[Case]]) -> None:
    segments = _segments(samples)
    shares = [_shares(samples, s) for s in segments]
    axes.bar(segments, [each.mean for each in shares], 0.7, **drawing.MARKS[2].as_bar())
    drawing.error_bars(axes, segments, shares)
    axes.set_ylim(0)
    axes.set_xticks(segments)
    axes.set_xlabel("best S")
    axes.set_ylabel("share of clusters [%]")
    axes.set_title("(b) all clusters: S")


def _draw_micro_batches(axes: Axes, samples: Sequence[Sequence[Case]]) -> None:
    """Median and quartiles of m, with the paper's three pairs."""
    cases = [case for drawn in samples for case in drawn]
    segments = _segments(samples)
    quartiles = np.array([np.percentile(_micro_batches(cases, s), [25, 50, 75]) for s in segments])
    median = quartiles[:, 1]
    axes.errorbar(
        segments,
        median,
        yerr=[median - quartiles[:, 0], quartiles[:, 2] - median],
        fmt="o",
        color=drawing.MARKS[0].shade,
        capsize=2.5,
        label="ours",
    )
    axes.plot(list(_PAPER), list(_PAPER.values()), "x", color="black", markersize=8, label="paper")
    axes.set_xticks(segments)
    axes.set_xlim(segments[0] - 0.5, segments[-1] + 0.5)
    axes.set_ylim(0, 1.4 * quartiles.max())
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("best S")
    axes.set_ylabel("best m")
    axes.legend(loc="upper left")
    axes.set_title("(c) all clusters: m")
