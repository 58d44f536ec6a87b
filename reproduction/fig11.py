"""Fig. 11: total delay over rounds with DSSRA, and with random, loss or delay scheduling."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
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

ROUNDS, PAPER_ROUNDS = 200, 10  # Algorithms 2 to 4 take the better part of a second a round
_PAPER = {"loss-only": 46.44, "delay-only": 15.48, "random": 7.12}
EVEN = ", even split"
_DSSRA = ("strategy=dssra", "strategy.segment_price=paper")


def dssra(weight: float) -> str:
    """Return the name of DSSRA with V = ``weight``."""
    return f"DSSRA, V = {weight:g}"


WEIGHTS = (0.01, 0.03, 0.1, 1.0, 10.0)
PLANNED: Mapping[str, Overrides] = {
    dssra(weight): (*_DSSRA, f"strategy.drift_weight={weight}") for weight in WEIGHTS
}
_V = "strategy.drift_weight=0.01"
_READINGS: Mapping[str, Overrides] = {
    # κ = βη²/(2N) with η = 0.01, β = 1, N = 8; the paper prints neither η nor β.
    "DSSRA, V = 0.01, κ of η = 0.01": (*_DSSRA, _V, "strategy.kappa=6.25e-6"),
    "DSSRA, V = 0.01, eq. 32 as printed": (*_DSSRA, _V, "strategy.drift=paper"),
}
RULES: Mapping[str, Overrides] = {
    "random": ("strategy=random",),
    "loss-only": ("strategy=loss_only",),
    "delay-only": ("strategy=delay_only",),
}
PERSISTENT = "loss-only, persistent losses"
_IN_FADING: Mapping[str, Overrides] = {
    **_READINGS,
    PERSISTENT: RULES["loss-only"],
    **{f"{each}{EVEN}": (*how, "strategy.partition=pipeline") for each, how in RULES.items()},
}
"""Runs in the worlds with fading only."""
_ADAPTERS = "channel.activation_bits=0"
MAIN = "fading, activations too"
WORLDS: Mapping[str, Overrides] = {
    MAIN: (),
    "fading, adapters": (_ADAPTERS,),
    "jitter, activations too": ("environment=jitter",),
    "jitter, adapters": ("environment=jitter", _ADAPTERS),
}
_FADING = tuple(WORLDS)[:2]
_THREE = {f"{MAIN}, N = 3": ("federation.num_units=3",)}
RUNS: Mapping[tuple[str, str], tuple[Overrides, Overrides]] = {
    (world, strategy): (options, how)
    for world, options in {**WORLDS, **_THREE}.items()
    for strategy, how in {**PLANNED, **RULES, **(_IN_FADING if world in _FADING else {})}.items()
}
"""World and strategy of each run."""
_KEEP_LOSSES = tuple((world, PERSISTENT) for world in _FADING)
"""Runs in which some units' rows stay harder than others', as in training on non-IID ones."""
_OWN, _ALGORITHMS = "DSSRA, V = 0.1", "DSSRA, V = 0.1, Algorithms 2 to 4"
SOLVERS = {_OWN: ((), PLANNED[_OWN]), _ALGORITHMS: ((), ("strategy=dssra_paper",))}
"""World and strategy of both runs."""
_AS_LINES = (dssra(0.01), dssra(10.0), "random", "delay-only")
_AGAINST_RANDOM = "reduction of {} against random; {}"


@dataclass(frozen=True, slots=True)
class Schedules:
    """A seed's runs of ``RUNS``; ``first`` has a few rounds of both solvers."""

    runs: Mapping[tuple[str, str], RunHistory]
    first: Mapping[str, RunHistory]


def shares(run: RunHistory) -> tuple[float, float]:
    """Return the least and the most rounds in which a unit took part, in %."""
    taken = np.mean([each.took_part for each in run], axis=0)
    return 100 * float(taken.min()), 100 * float(taken.max())


def queues(run: RunHistory) -> tuple[float, float]:
    """Return the mean of the largest queue over the third and over the last quarter of rounds."""
    largest, half, quarter = [each.largest_queue for each in run], len(run) // 2, len(run) * 3 // 4
    return float(np.mean(largest[half:quarter])), float(np.mean(largest[quarter:]))


def _compute(seed: int) -> Schedules:
    """Run DSSRA with several V, and the other rules, over the same rounds."""
    first = run_histories(seed, PAPER_ROUNDS, SOLVERS)
    return Schedules(run_histories(seed, ROUNDS, RUNS, _KEEP_LOSSES), first)


def _rows(seed: int, schedules: Schedules) -> Iterator[Row]:
    for key, run in schedules.runs.items():
        totals = itertools.accumulate(each.delay_s for each in run)
        for number, (each, total) in enumerate(zip(run, totals, strict=True), start=1):
            yield seed, *key, number, each.delay_s, total, each.largest_queue


def _findings(seeds: Sequence[Schedules]) -> Iterator[Finding]:
    every = [each.runs for each in seeds]
    for world in (*WORLDS, *_THREE):
        strategies = [strategy for where, strategy in RUNS if where == world]
        planned = [each for each in strategies if each in PLANNED or each in _READINGS]
        for strategy in strategies:
            runs = [each[world, strategy] for each in every]
            yield from _of_strategy(runs, strategy, world, strategy in planned)
        owns = [each for each in strategies if not each.endswith(EVEN)]
        for own, other in itertools.product(owns, strategies):
            if other in (own, *planned):
                continue
            ours = reduction(every, (world, own), (world, other), total_s)
            text = f"reduction of {own} against {other}; {world}"
            if own == dssra(0.01) and world in WORLDS:
                paper = _PAPER[other.removesuffix(EVEN).removesuffix(", persistent losses")]
                yield near(text, paper, ours, "%")
            else:
                yield Finding(text, ours, "%")
    text = f"reduction of {_OWN} against its Algorithms 2 to 4, first {PAPER_ROUNDS} rounds; {MAIN}"
    ours = reduction([each.first for each in seeds], _OWN, _ALGORITHMS, total_s)
    yield Finding(text, ours, "%")


def _of_strategy(
    runs: Sequence[RunHistory], strategy: str, world: str, keeps_queues: bool
) -> Iterator[Finding]:
    yield Finding(f"{strategy}: total delay; {world}", over_seeds(map(total_s, runs)), "s")
    for which, percents in zip(
        ("least", "most"), zip(*map(shares, runs), strict=True), strict=True
    ):
        text = f"{strategy}: rounds of the {which} scheduled unit; {world}"
        yield Finding(text, share_over_seeds(percents), "%")
    units = over_seeds(float(np.mean([sum(each.took_part) for each in run])) for run in runs)
    yield Finding(f"{strategy}: units in a round; {world}", units, "1")
    if keeps_queues:
        late = over_seeds(queues(run)[1] for run in runs)
        yield Finding(f"{strategy}: largest queue, mean of the last quarter; {world}", late, "1")
        grown = over_seeds(after - before for before, after in map(queues, runs))
        yield Finding(f"{strategy}: growth of that against the quarter before; {world}", grown, "1")


def _draw(seeds: Sequence[Schedules], ours: Ours) -> Figure:
    """Draw totals in the first world; below, delay and participation over V for each world."""
    figure = Figure((drawing.WIDTH_IN, 7.2), layout="constrained")
    top, bottom = figure.subfigures(2, squeeze=False, height_ratios=[1, 1.6])[:, 0]
    totals, bars = top.subplots(1, 2)
    _draw_totals(totals, seeds)
    _draw_bars(bars, ours)
    delays, rounds = bottom.subplots(2, len(WORLDS), sharex=True, sharey="row")
    for above, below, world in zip(delays, rounds, WORLDS, strict=True):
        _draw_world(above, below, world, ours)
    delays[0].set_ylabel("(c) total delay\nagainst random [%]")
    rounds[0].set(ylim=(0, 100), ylabel="(d) rounds of the least and\nmost scheduled unit [%]")
    labels = ["DSSRA over V", "random", "delay-only"]
    bottom.legend(delays[0].lines, labels, loc="outside lower center", ncols=3)
    return figure


def _draw_totals(axes: Axes, seeds: Sequence[Schedules]) -> None:
    """Draw the paper's picture: total delay over rounds."""
    series = {}
    for strategy in _AS_LINES:
        delays_s = [[each.delay_s for each in seed.runs[MAIN, strategy]] for seed in seeds]
        thousands = drawing.over_places(np.cumsum(delays_s, axis=1) / 1000)
        series[strategy] = (range(1, len(thousands) + 1), thousands)
    drawing.draw_lines(axes, series, bands=False)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="round", ylabel="total delay [1,000 s]")
    axes.set_title(f"(a) {MAIN}")
    axes.legend(loc="upper left")


def _draw_bars(axes: Axes, ours: Ours) -> None:
    """Draw reductions against random scheduling, of all runs with the exact split."""
    chosen = [*PLANNED, "delay-only", "loss-only", PERSISTENT]
    found = [ours[_AGAINST_RANDOM.format(each, MAIN)] for each in chosen]
    places = range(len(chosen))
    axes.barh(places, [-each.mean for each in found], 0.7, **drawing.MARKS[0].as_bar())
    drawing.error_bars(axes, places, [-each for each in found], level=True)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(places, [each.replace("only, p", "only,\np") for each in chosen])
    axes.invert_yaxis()
    axes.set(xlabel="total delay against random [%]", title=f"(b) {MAIN}")


def _draw_world(delays: Axes, rounds: Axes, world: str, ours: Ours) -> None:
    """Draw DSSRA over V in one world, and delay-only scheduling."""

    def over_weights(text: str) -> drawing.Series:
        return {"": (WEIGHTS, [ours[text.format(dssra(weight), world)] for weight in WEIGHTS])}

    ((x, found),) = over_weights(_AGAINST_RANDOM).values()
    drawing.draw_lines(delays, {"": (x, [-each for each in found])}, markevery=1)
    delays.axhline(0, color="black", linewidth=0.8)
    level, mark = ours[_AGAINST_RANDOM.format("delay-only", world)], drawing.MARKS[1]
    delays.axhline(-level.mean, color=mark.colour, linestyle=mark.line)
    delays.set_title(world.replace(", ", ",\n"))
    for which in ("least", "most"):
        text = f"{{}}: rounds of the {which} scheduled unit; {{}}"
        drawing.draw_lines(rounds, over_weights(text), markevery=1)
    rounds.set(xscale="log", xlabel="V [1/s]")
    rounds.set_xticks(WEIGHTS, [f"{weight:g}" if weight != 0.03 else "" for weight in WEIGHTS])
    rounds.minorticks_off()


_COLUMNS = ("seed", "world", "strategy", "round", "delay_s", "total_s", "largest_queue")
_SETTINGS = dict[str, Cell](experiment="fig11", rounds=ROUNDS, rounds_of_algorithms=PAPER_ROUNDS)
FIGURE = PaperFigure("fig11", _COLUMNS, _compute, _rows, _findings, _draw, _SETTINGS, num_seeds=8)
