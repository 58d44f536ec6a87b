"""Fig. 11: total delay over rounds under DSSRA, against scheduling by chance, loss or delay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe.cli.reproduce import drawing
from collapipe.cli.reproduce.evidence import (
    Cell,
    Claim,
    Evidence,
    Finding,
    Interval,
    over_seeds,
    share_over_seeds,
    within_a_quarter,
)
from collapipe.cli.reproduce.scheduling import (
    JITTER,
    UNITS,
    Course,
    Dssra,
    Rule,
    Strategy,
    at_random,
    courses,
    highest_loss,
    radio,
    shortest_delay,
)
from collapipe.cli.reproduce.worlds import BATCH_SIZE, BERT_BLOCKS

ROUNDS = 200
_PAPER = MappingProxyType({"loss-only": 46.44, "delay-only": 15.48, "random": 7.12})
_EVEN = ", even split"
_PLANNED = {f"DSSRA, V = {weight:g}": Dssra(weight) for weight in (0.01, 0.03, 0.1, 1.0, 10.0)}
_RULES = {
    "random": Rule(at_random),
    "loss-only": Rule(highest_loss),
    "delay-only": Rule(shortest_delay),
}
_STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        **_PLANNED,
        **_RULES,
        **{f"{name}{_EVEN}": Rule(rule.choose, even=True) for name, rule in _RULES.items()},
    }
)
_SAME_SPLIT = (*_PLANNED, *_RULES)
_FIRST, *_, _LAST = _PLANNED
_AS_LINES = (_FIRST, _LAST, *_RULES, f"random{_EVEN}")
_ADAPTERS, _ALL = "adapters uploaded", "activations uploaded too"


@dataclass(frozen=True, slots=True)
class Sample:
    """One seed's courses, by what is uploaded and by strategy."""

    courses: Mapping[str, Mapping[str, Course]]

    def total_s(self, uploads: str, strategy: str) -> float:
        """Sum of all rounds' delays."""
        return float(sum(self.courses[uploads][strategy].delays_s))

    def cut(self, uploads: str, of: str, against: str) -> float:
        """By how many percent one total is below another."""
        return 100 * (1 - self.total_s(uploads, of) / self.total_s(uploads, against))

    def shares(self, uploads: str, strategy: str) -> tuple[float, float]:
        """Least and most of the rounds that a unit took part in, %."""
        rounds = self.courses[uploads][strategy].rounds
        return 100 * min(rounds) / ROUNDS, 100 * max(rounds) / ROUNDS


def evidence(seeds: Sequence[int]) -> Evidence:
    """DSSRA with several V, and the rules, over the same rounds."""
    samples = {seed: _sample(seed) for seed in seeds}
    return Evidence(
        columns=("seed", "uploads", "strategy", "round", "delay_s", "total_s"),
        rows=[row for seed, each in samples.items() for row in _rows(seed, each)],
        claims=_claims(list(samples.values())),
        findings=_findings(list(samples.values())),
        settings={
            "num_blocks": BERT_BLOCKS,
            "batch_size": BATCH_SIZE,
            "local_steps": 1,
            "latency": "bound",
            "drift": "gamma",
            "units": UNITS,
            "rounds": ROUNDS,
            "jitter": JITTER,
        },
        picture=_picture(list(samples.values())),
    )


def _sample(seed: int) -> Sample:
    radios = {_ADAPTERS: radio(seed).without_activations(), _ALL: radio(seed)}
    found = courses(seed, ROUNDS, tuple(_STRATEGIES.values()), tuple(radios.values()))
    named = (dict(zip(_STRATEGIES, row, strict=True)) for row in found)
    return Sample(dict(zip(radios, named, strict=True)))


def _rows(seed: int, sample: Sample) -> list[tuple[Cell, ...]]:
    return [
        (seed, uploads, strategy, place + 1, delay, float(total))
        for uploads, by_strategy in sample.courses.items()
        for strategy, course in by_strategy.items()
        for place, (delay, total) in enumerate(
            zip(course.delays_s, np.cumsum(course.delays_s), strict=True)
        )
    ]


def _cut(samples: Sequence[Sample], uploads: str, of: str, against: str) -> Interval:
    return over_seeds([each.cut(uploads, of, against) for each in samples])


def _claims(samples: Sequence[Sample]) -> tuple[Claim, ...]:
    return tuple(
        within_a_quarter(
            f"cut of {_FIRST} against {rule}{split}; {uploads}",
            paper,
            _cut(samples, uploads, _FIRST, f"{rule}{split}"),
            "%",
        )
        for uploads in (_ADAPTERS, _ALL)
        for split in ("", _EVEN)
        for rule, paper in _PAPER.items()
    )


def _findings(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    return tuple(
        finding
        for uploads in (_ADAPTERS, _ALL)
        for found in (_totals, _cuts, _participation, _queues)
        for finding in found(samples, uploads)
    )


def _totals(samples: Sequence[Sample], uploads: str) -> list[Finding]:
    return [
        Finding(
            f"{each}: total delay; {uploads}",
            over_seeds([sample.total_s(uploads, each) for sample in samples]),
            "s",
        )
        for each in _STRATEGIES
    ]


def _cuts(samples: Sequence[Sample], uploads: str) -> list[Finding]:
    return [
        Finding(f"cut of {own} against {rule}; {uploads}", _cut(samples, uploads, own, rule), "%")
        for own in _SAME_SPLIT
        for rule in _STRATEGIES
        if rule not in (own, *_PLANNED)
    ]


def _participation(samples: Sequence[Sample], uploads: str) -> list[Finding]:
    return [
        Finding(f"{each}: rounds of the {which} scheduled unit; {uploads}", interval, "%")
        for each in _STRATEGIES
        for which, interval in zip(("least", "most"), _shares(samples, uploads, each), strict=True)
    ]


def _queues(samples: Sequence[Sample], uploads: str) -> list[Finding]:
    return [
        Finding(
            f"{each}: largest queue after the last round; {uploads}",
            over_seeds([max(sample.courses[uploads][each].queues) for sample in samples]),
            "1",
        )
        for each in _PLANNED
    ]


def _shares(samples: Sequence[Sample], uploads: str, strategy: str) -> tuple[Interval, Interval]:
    least, most = zip(*(each.shares(uploads, strategy) for each in samples), strict=True)
    return share_over_seeds(least), share_over_seeds(most)


def _picture(samples: Sequence[Sample]) -> Figure:
    figure, (left, middle, right) = drawing.panels(4.2, 3, width_ratios=[1.5, 1.1, 0.9])
    _draw_lines(left, samples)
    _draw_totals(middle, samples)
    _draw_shares(right, samples)
    for each in (middle, right):
        each.set_ylim(len(_SAME_SPLIT) - 0.4, -0.6)
    drawing.legend_below(figure, (left, middle), 3)
    return figure


def _draw_lines(axes: Axes, samples: Sequence[Sample]) -> None:
    rounds = np.arange(1, ROUNDS + 1)
    every = max(ROUNDS // 5, 1)
    for place, (mark, strategy) in enumerate(zip(drawing.MARKS, _AS_LINES, strict=False)):
        totals = [np.cumsum(each.courses[_ALL][strategy].delays_s) for each in samples]
        axes.plot(
            rounds,
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
    axes.set_title("(a) activations uploaded too")


def _draw_totals(axes: Axes, samples: Sequence[Sample]) -> None:
    marks = {_ADAPTERS: drawing.MARKS[4], _ALL: drawing.MARKS[2]}
    for offset, (uploads, mark) in zip((-0.2, 0.2), marks.items(), strict=True):
        differences = [
            over_seeds([-sample.cut(uploads, each, "random") for sample in samples])
            for each in _SAME_SPLIT
        ]
        places = [place + offset for place in range(len(_SAME_SPLIT))]
        means = [each.mean for each in differences]
        axes.barh(places, means, 0.4, **mark.as_bar(), label=uploads)
        drawing.level_error_bars(axes, places, differences)
    axes.set_yticks(range(len(_SAME_SPLIT)), _SAME_SPLIT)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("against random [%]")
    axes.set_title("(b) total delay")


def _draw_shares(axes: Axes, samples: Sequence[Sample]) -> None:
    """From the least to the most scheduled unit's share of the rounds."""
    for place, strategy in enumerate(_SAME_SPLIT):
        ends = [each.mean for each in _shares(samples, _ALL, strategy)]
        axes.plot(ends, [place, place], "-|", color="black", markersize=8)
    axes.set_yticks(range(len(_SAME_SPLIT)), [""] * len(_SAME_SPLIT))
    axes.set_xlim(-5, 105)
    axes.set_xticks([0, 50, 100])
    axes.set_xlabel("rounds of a unit [%]")
    axes.set_title("(c) participation")
