"""Fig. 11: total delay over rounds under DSSRA, against scheduling by chance, loss or delay."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from collapipe.reproduction.processes import of_seeds
from collapipe.reproduction.scheduling import Course, Options, courses
from collapipe.runs.evidence import (
    Cell,
    Claim,
    Evidence,
    Finding,
    Interval,
    over_seeds,
    share_over_seeds,
    within_a_quarter,
)

ROUNDS, PAPER_ROUNDS = 200, 10  # Algorithms 2 to 4 take the better part of a second a round
PROCESSES = 2
_PAPER = MappingProxyType({"loss-only": 46.44, "delay-only": 15.48, "random": 7.12})
EVEN = ", even split"
_DSSRA = "strategy=dssra"


def dssra(weight: float) -> str:
    """The name of DSSRA with V = ``weight``."""
    return f"DSSRA, V = {weight:g}"


WEIGHTS = (0.01, 0.03, 0.1, 1.0, 10.0)
PLANNED: Mapping[str, Options] = MappingProxyType(
    {dssra(weight): (_DSSRA, f"strategy.drift_weight={weight}") for weight in WEIGHTS}
)
# κ = βη²/(2N) of Table II: η = 0.01, β = 1, N = 8.
_READINGS: Mapping[str, Options] = MappingProxyType(
    {
        "DSSRA, V and κ of Table II": (
            _DSSRA,
            "strategy.drift_weight=0.01",
            "strategy.kappa=6.25e-6",
        ),
        "DSSRA, V = 0.01, eq. 32 as printed": (
            _DSSRA,
            "strategy.drift_weight=0.01",
            "strategy.drift=paper",
        ),
    }
)
RULES: Mapping[str, Options] = MappingProxyType(
    {
        "random": ("strategy=random",),
        "loss-only": ("strategy=loss_only",),
        "delay-only": ("strategy=delay_only",),
    }
)
_STRATEGIES: Mapping[str, Options] = MappingProxyType({**PLANNED, **RULES})
_BESIDE: Mapping[str, Options] = MappingProxyType(
    {
        **_READINGS,
        **{f"{each}{EVEN}": (*how, "strategy.partition=pipeline") for each, how in RULES.items()},
    }
)
"""In the worlds with fading only."""
_ADAPTERS = "channel.activation_bits=0"
MAIN = "fading, activations too"
WORLDS: Mapping[str, Options] = MappingProxyType(
    {
        MAIN: (),
        "fading, adapters": (_ADAPTERS,),
        "jitter, activations too": ("environment=jitter",),
        "jitter, adapters": ("environment=jitter", _ADAPTERS),
    }
)
_FADING = tuple(WORLDS)[:2]
_THREE = f"{MAIN}, N = 3"
_OWN, _ALGORITHMS = "DSSRA, V = 0.1", "DSSRA, V = 0.1, Algorithms 2 to 4"


@dataclass(frozen=True, slots=True)
class Sample:
    """One seed's courses, by world and strategy; ``first`` are those of both solvers."""

    courses: Mapping[str, Mapping[str, Course]]
    first: Mapping[str, Course]

    def delays_s(self, world: str, strategy: str) -> list[float]:
        """Of each round."""
        return [turn.delay_s for turn in self.courses[world][strategy]]

    def cut(self, world: str, of: str, against: str) -> float:
        """By how many percent one total is below another."""
        return _cut(self.courses[world][of], self.courses[world][against])

    def shares(self, world: str, strategy: str) -> tuple[float, float]:
        """Least and most of the rounds that a unit took part in, %."""
        taken = np.mean([turn.took_part for turn in self.courses[world][strategy]], axis=0)
        return 100 * float(taken.min()), 100 * float(taken.max())

    def num_units(self, world: str, strategy: str) -> float:
        """Mean of the rounds."""
        return float(np.mean([sum(turn.took_part) for turn in self.courses[world][strategy]]))

    def queues(self, world: str, strategy: str) -> tuple[float, float]:
        """Mean of the largest queue over the third and over the last quarter of the rounds."""
        each = [turn.largest_queue for turn in self.courses[world][strategy]]
        half, quarter = len(each) // 2, len(each) * 3 // 4
        return float(np.mean(each[half:quarter])), float(np.mean(each[quarter:]))


def evidence(seeds: Sequence[int]) -> Evidence:
    """DSSRA with several V, and the rules, over the same rounds."""
    from collapipe.reproduction.fig11_picture import picture

    sample = functools.partial(_sample, rounds=ROUNDS, paper_rounds=PAPER_ROUNDS)
    samples = of_seeds(sample, seeds, PROCESSES)
    return Evidence(
        columns=("seed", "world", "strategy", "round", "delay_s", "total_s", "largest_queue"),
        rows=[row for seed, each in zip(seeds, samples, strict=True) for row in _rows(seed, each)],
        claims=_claims(samples),
        findings=_findings(samples),
        settings={"experiment": "fig11", "rounds": ROUNDS, "rounds_of_algorithms": PAPER_ROUNDS},
        picture=picture(samples),
    )


def _sample(seed: int, rounds: int, paper_rounds: int) -> Sample:
    found = courses(seed, rounds, WORLDS, _STRATEGIES)
    beside = courses(seed, rounds, {world: WORLDS[world] for world in _FADING}, _BESIDE)
    for world, by_strategy in beside.items():
        found[world] |= by_strategy
    found |= courses(seed, rounds, {_THREE: ("federation.num_units=3",)}, _STRATEGIES)
    solvers = {_OWN: PLANNED[_OWN], _ALGORITHMS: ("strategy=dssra_paper",)}
    first = courses(seed, paper_rounds, {MAIN: ()}, solvers)
    return Sample(found, first[MAIN])


def _cut(of: Course, against: Course) -> float:
    total, other = (sum(turn.delay_s for turn in course) for course in (of, against))
    return 100 * (1 - total / other)


def _rows(seed: int, sample: Sample) -> list[tuple[Cell, ...]]:
    return [
        (seed, world, strategy, number, turn.delay_s, float(total), turn.largest_queue)
        for world, by_strategy in sample.courses.items()
        for strategy, course in by_strategy.items()
        for number, (turn, total) in enumerate(
            zip(course, np.cumsum(sample.delays_s(world, strategy)), strict=True), start=1
        )
    ]


def cut(samples: Sequence[Sample], world: str, of: str, against: str) -> Interval:
    """Paired by seed, %."""
    return over_seeds([each.cut(world, of, against) for each in samples])


def _claims(samples: Sequence[Sample]) -> tuple[Claim, ...]:
    return tuple(
        within_a_quarter(
            f"cut of {dssra(0.01)} against {rule}{split}; {world}",
            paper,
            cut(samples, world, dssra(0.01), f"{rule}{split}"),
            "%",
        )
        for world in WORLDS
        for split in ("", EVEN)
        for rule, paper in _PAPER.items()
        if f"{rule}{split}" in samples[0].courses[world]
    )


def _findings(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    return (
        *(
            finding
            for world in (*WORLDS, _THREE)
            for found in (_totals, _cuts, _participation, _queues)
            for finding in found(samples, world)
        ),
        Finding(
            f"cut of {_OWN} against its Algorithms 2 to 4, first {PAPER_ROUNDS} rounds; {MAIN}",
            over_seeds([_cut(each.first[_OWN], each.first[_ALGORITHMS]) for each in samples]),
            "%",
        ),
    )


def _totals(samples: Sequence[Sample], world: str) -> list[Finding]:
    return [
        Finding(
            f"{each}: total delay; {world}",
            over_seeds([sum(sample.delays_s(world, each)) for sample in samples]),
            "s",
        )
        for each in samples[0].courses[world]
    ]


def _cuts(samples: Sequence[Sample], world: str) -> list[Finding]:
    there = samples[0].courses[world]
    planned = _planned(there)
    return [
        Finding(f"cut of {own} against {other}; {world}", cut(samples, world, own, other), "%")
        for own in (*planned, *RULES)
        for other in there
        if other not in (own, *planned)
    ]


def _planned(strategies: Iterable[str]) -> list[str]:
    """Those that keep queues."""
    return [each for each in strategies if each in PLANNED or each in _READINGS]


def _participation(samples: Sequence[Sample], world: str) -> list[Finding]:
    found = []
    for each in samples[0].courses[world]:
        for which, interval in zip(("least", "most"), shares(samples, world, each), strict=True):
            text = f"{each}: rounds of the {which} scheduled unit; {world}"
            found.append(Finding(text, interval, "%"))
        text = f"{each}: units in a round; {world}"
        found.append(Finding(text, over_seeds([s.num_units(world, each) for s in samples]), "1"))
    return found


def shares(samples: Sequence[Sample], world: str, strategy: str) -> tuple[Interval, Interval]:
    """Of the rounds, of the least and of the most scheduled unit, %."""
    least, most = zip(*(each.shares(world, strategy) for each in samples), strict=True)
    return share_over_seeds(least), share_over_seeds(most)


def _queues(samples: Sequence[Sample], world: str) -> list[Finding]:
    found = []
    for each in _planned(samples[0].courses[world]):
        before, after = zip(*(sample.queues(world, each) for sample in samples), strict=True)
        grown = [late - early for early, late in zip(before, after, strict=True)]
        for text, values in (
            ("largest queue, mean of the last quarter", after),
            ("growth of that against the quarter before", grown),
        ):
            found.append(Finding(f"{each}: {text}; {world}", over_seeds(values), "1"))
    return found
