"""Round times of every framework, on devices and with uploads; when CollaPipe's is shorter.

All of N = 3 clusters take part in each round, as in the paper, with the channels and powers that
minimize its time. Every framework meets the same devices and channels.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from collapipe.runs.evidence import over_seeds
from reproduction import drawing
from reproduction.figure import (
    Cell,
    Finding,
    Ours,
    PaperFigure,
    Row,
    near,
    reduction,
    share_over_seeds,
)
from reproduction.scheduling import Overrides, RunHistory, run_histories, total_s

ROUNDS, UNITS = 5, 3
LABELS: Mapping[str, str] = {
    "collapipe": "CollaPipe",
    "vanilla_fl": "VanillaFL",
    "titanic": "TITANIC",
    "pipeline": "PipeLine",
    "collapipe_no_ss": "CollaPipe w/o SS",
    "splitfed": "SplitFed, cut = 1",
}
"""Labels by option ``framework``. "w/o SS" is the paper's "without segment scheduling"."""
OWN, RIVAL = "collapipe", "vanilla_fl"
_PAPER = {RIVAL: 15.09, "titanic": 18.94, "pipeline": 40.55}
ENVIRONMENTS = ("static", "jitter")
_ACTIVATIONS, _ADAPTERS = "activations too", "adapters"
_UPLOADS: Mapping[str, Overrides] = {_ACTIVATIONS: (), _ADAPTERS: ("channel.activation_bits=0",)}
_WIDTH = "model.dim=768"  # realistic width, so that scales add few bits
PAYLOADS: Mapping[str, Overrides] = {
    "float32": (),
    "bfloat16": ("compression.activation=bfloat16",),
    "int8": ("compression.activation=int8", _WIDTH),
    "chosen": ("compression.activation=auto", _WIDTH),
    "chosen, adapters too": ("compression=auto", _WIDTH),
    "head on the control unit": ("channel.activation_bits=0",),
}
"""Precisions of messages; "chosen": by the scheduler, within the error that a round may have."""
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Factors of the uplinks' bandwidth."""
Runs = Mapping[str, RunHistory]
"""A seed's runs by world."""
Seconds = Callable[[RunHistory], float]


def mean_cluster_s(run: RunHistory) -> float:
    """Return the mean time of a round's pipelines, summed over rounds, without uplinks."""
    return sum(math.fsum(each.pipelines_s) / len(each.pipelines_s) for each in run)


_COUNTED: Mapping[str, tuple[Seconds, str]] = {
    "cluster delay": (mean_cluster_s, _ADAPTERS),
    "total, adapters": (total_s, _ADAPTERS),
    "total, activations too": (total_s, _ACTIVATIONS),
    "slowest cluster": (lambda run: sum(max(each.pipelines_s) for each in run), _ADAPTERS),
}
"""Counted times, and the uploads with which they are computed: CollaPipe plans splits such that
uploads of activations overlap with the pipeline. The paper may mean one of the first three."""
_CLAIMED = tuple(_COUNTED)[:3]
_AGAINST_RIVAL = "reduction against VanillaFL, total; {}"


def plain(framework: str, environment: str = "static", uploads: str = _ACTIVATIONS) -> str:
    """Return the name of a world in the comparison of frameworks."""
    return f"{LABELS[framework]}; {environment}, {uploads}"


def scaled(what: str, factor: float) -> str:
    """Return the name of a world with other uplinks; ``what`` is a payload or VanillaFL's label."""
    return f"{what}; {factor:g} times the bandwidth"


def worlds() -> dict[str, Overrides]:
    """Return each framework's worlds, and CollaPipe's and VanillaFL's with other uplinks."""
    found: dict[str, Overrides] = {
        plain(name, environment, uploads): (
            f"framework={name}",
            f"environment={environment}",
            *options,
        )
        for environment in ENVIRONMENTS
        for uploads, options in _UPLOADS.items()
        for name in LABELS
    }
    sent: dict[str, Overrides] = {**PAYLOADS, LABELS[RIVAL]: (f"framework={RIVAL}",)}
    for (what, options), factor in itertools.product(sent.items(), FACTORS):
        bandwidth = f"channel.bandwidth_hz=[{0.4e6 * factor},{0.6e6 * factor}]"
        found[scaled(what, factor)] = *options, "environment=static", bandwidth
    return found


def _compute(seed: int) -> Runs:
    return play(seed, ROUNDS, worlds())


def play(seed: int, rounds: int, among: Mapping[str, Overrides]) -> Runs:
    """Return a seed's rounds in each world, with every unit in every round."""
    units, everyone = f"federation.num_units={UNITS}", ("strategy=all",)
    runs = {name: ((*options, units), everyone) for name, options in among.items()}
    return run_histories(seed, rounds, runs)


def _rows(seed: int, runs: Runs) -> Iterator[Row]:
    for world, run in runs.items():
        for number, each in enumerate(run, start=1):
            mean_s, slowest_s = float(np.mean(each.pipelines_s)), max(each.pipelines_s)
            yield seed, world, number, mean_s, slowest_s, each.delay_s


def _findings(seeds: Sequence[Runs]) -> Iterator[Finding]:
    for environment in ENVIRONMENTS:
        for counted, (seconds, uploads) in _COUNTED.items():
            for name, label in LABELS.items():
                own, other = (plain(each, environment, uploads) for each in (OWN, name))
                a_round = over_seeds(seconds(each[other]) / len(each[other]) for each in seeds)
                yield Finding(f"{label}: {counted}; {environment}, a round", a_round, "s")
                text = f"reduction against {label}, {counted}; {environment}"
                below = reduction(seeds, own, other, seconds)
                if name in _PAPER and counted in _CLAIMED and environment == ENVIRONMENTS[0]:
                    yield near(text, _PAPER[name], below, "%")
                elif name != OWN:
                    yield Finding(text, below, "%")
        for name, label in LABELS.items():
            runs = [each[plain(name, environment)] for each in seeds]
            percents = share_over_seeds(
                100 * float(np.mean([each.over_limits / UNITS for each in run])) for run in runs
            )
            text = f"{label}: plans that exceed memory or energy; {environment}"
            yield Finding(text, percents, "%")
    for payload in PAYLOADS:
        for factor in FACTORS:
            own, rival = (scaled(what, factor) for what in (payload, LABELS[RIVAL]))
            yield Finding(_AGAINST_RIVAL.format(own), reduction(seeds, own, rival, total_s), "%")


def _draw(seeds: Sequence[Runs], ours: Ours) -> Figure:
    """Draw rounds on static devices, and reductions over the uplinks' bandwidth."""
    figure, (left, right) = drawing.panels(3.9, 2, width_ratios=[1.1, 1])
    for place, (mark, counted) in enumerate(zip(drawing.MARKS, _CLAIMED, strict=False)):
        places = [number + 0.27 * (place - 1) for number in range(len(LABELS))]
        found = [ours[f"{label}: {counted}; static, a round"] for label in LABELS.values()]
        left.barh(places, [each.mean for each in found], 0.26, **mark.as_bar(), label=counted)
        drawing.error_bars(left, places, found, level=True)
    left.set_yticks(np.arange(len(LABELS)), LABELS.values())
    left.invert_yaxis()
    left.set(xlabel="a round [s]", title="(a) static clusters")
    series = {}
    for place, (mark, what) in enumerate(zip(drawing.MARKS, PAYLOADS, strict=False)):
        aside = [each + 0.07 * (place - (len(PAYLOADS) - 1) / 2) for each in FACTORS]
        below = [ours[_AGAINST_RIVAL.format(scaled(what, each))] for each in FACTORS]
        series[what] = aside, below
        drawing.error_bars(right, aside, below, color=mark.colour, capsize=1.5, elinewidth=0.8)
    drawing.draw_lines(right, series, bands=False)  # they would overlap
    right.set(xlabel="uplinks' bandwidth [Table II's]", ylabel="total below VanillaFL's by [%]")
    right.set_title("(b) CollaPipe against VanillaFL")
    for axes in (left, right):
        drawing.legend_below(axes, 2)
    return figure


_COLUMNS = ("seed", "world", "round", "mean_pipeline_s", "slowest_pipeline_s", "delay_s")
_SETTINGS = dict[str, Cell](experiment="fig11", strategy="all", rounds=ROUNDS, units=UNITS)
FIGURE = PaperFigure("frameworks", _COLUMNS, _compute, _rows, _findings, _draw, _SETTINGS, 20)
