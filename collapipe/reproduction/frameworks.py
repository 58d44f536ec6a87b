"""What a round of every framework takes on devices, and with uploads; when CollaPipe's is shorter.

All of N = 3 clusters take part in each round, as in the paper, with the channels and powers that
end it soonest. Every framework meets the same devices and channels.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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

ROUNDS, PROCESSES = 5, 2
UNITS = 3
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "collapipe": "CollaPipe",
        "vanilla_fl": "VanillaFL",
        "titanic": "TITANIC",
        "pipeline": "PipeLine",
        "collapipe_no_ss": "CollaPipe w/o SS",
        "splitfed": "SplitFed, cut = 1",
    }
)
"""By the option ``framework``. "w/o SS" is the paper's short for: without segment scheduling."""
OWN, RIVAL = "collapipe", "vanilla_fl"
_CUTS = MappingProxyType({RIVAL: 15.09, "titanic": 18.94, "pipeline": 40.55})
ENVIRONMENTS = ("static", "jitter")
_ACTIVATIONS, _ADAPTERS = "activations too", "adapters"
_UPLOADS: Mapping[str, Options] = MappingProxyType(
    {_ACTIVATIONS: (), _ADAPTERS: ("channel.activation_bits=0",)}
)
_FLOAT32_BITS = 100663296  # of a local step's activations: 64 samples × 64 tokens × 768 × 32 bit
PAYLOADS: Mapping[str, float] = MappingProxyType(
    {
        "float32": 1.0,
        "bfloat16": 0.5,
        "int8": 0.25 + 1 / 768,  # a scale of 32 bits for each token
        "head on the control unit": 0.0,
    }
)
"""Of ``_FLOAT32_BITS``, by what activations are sent in."""
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Of the uplinks' bandwidth."""
Sample = Mapping[str, Course]
Seconds = Callable[[Course], float]


def mean_cluster_s(course: Course) -> float:
    """Mean of a round's pipelines, summed over rounds: the cluster delay, without uplinks."""
    return sum(math.fsum(turn.pipelines_s) / len(turn.pipelines_s) for turn in course)


def slowest_cluster_s(course: Course) -> float:
    """Its longest pipeline, summed over rounds."""
    return sum(max(turn.pipelines_s) for turn in course)


def total_s(course: Course) -> float:
    """With uploads, of the unit that ends last, summed over rounds."""
    return sum(turn.delay_s for turn in course)


def evidence(seeds: Sequence[int]) -> Evidence:
    """All frameworks; then CollaPipe with fewer bits and faster uplinks against VanillaFL."""
    from collapipe.reproduction.frameworks_picture import picture

    sample = functools.partial(_sample, rounds=ROUNDS, worlds=_worlds())
    samples = of_seeds(sample, seeds, PROCESSES)
    return Evidence(
        columns=("seed", "world", "round", "mean_pipeline_s", "slowest_pipeline_s", "delay_s"),
        rows=[row for seed, each in zip(seeds, samples, strict=True) for row in _rows(seed, each)],
        claims=_claims(samples),
        findings=(*_of_frameworks(samples), *_of_uplinks(samples)),
        settings={"experiment": "fig11", "strategy": "all", "rounds": ROUNDS, "units": UNITS},
        picture=picture(samples, FACTORS),
    )


def plain(framework: str, environment: str = "static", uploads: str = _ACTIVATIONS) -> str:
    """The name of a world of the comparison of frameworks."""
    return f"{LABELS[framework]}; {environment}, {uploads}"


def scaled(what: str, factor: float) -> str:
    """The name of a world with other uplinks: ``what`` is a payload, or VanillaFL's label."""
    return f"{what}; {factor:g} times the bandwidth"


def cut(samples: Sequence[Sample], seconds: Seconds, of: str, against: str) -> Interval:
    """By how many percent one world's time is below another's, paired by seed."""
    return over_seeds([100 * (1 - seconds(each[of]) / seconds(each[against])) for each in samples])


def _worlds() -> dict[str, Options]:
    compared: dict[str, Options] = {
        plain(name, environment, uploads): (
            f"framework={name}",
            f"environment={environment}",
            *options,
        )
        for environment in ENVIRONMENTS
        for uploads, options in _UPLOADS.items()
        for name in LABELS
    }
    own: dict[str, Options] = {
        scaled(payload, factor): (
            *_bandwidth(factor),
            f"channel.activation_bits={share * _FLOAT32_BITS}",
        )
        for payload, share in PAYLOADS.items()
        for factor in FACTORS
    }
    rival: dict[str, Options] = {
        scaled(LABELS[RIVAL], factor): (*_bandwidth(factor), f"framework={RIVAL}")
        for factor in FACTORS
    }
    return compared | own | rival


def _bandwidth(factor: float) -> tuple[str, str]:
    return "environment=static", f"channel.bandwidth_hz=[{0.4e6 * factor},{0.6e6 * factor}]"


def _sample(seed: int, rounds: int, worlds: Mapping[str, Options]) -> Sample:
    everyone = {
        name: (*options, f"federation.num_units={UNITS}") for name, options in worlds.items()
    }
    found = courses(seed, rounds, everyone, {"all": ("strategy=all",)})
    return {name: course for name, by_strategy in found.items() for course in by_strategy.values()}


def _rows(seed: int, sample: Sample) -> list[tuple[Cell, ...]]:
    return [
        (
            seed,
            world,
            number,
            float(np.mean(turn.pipelines_s)),
            max(turn.pipelines_s),
            turn.delay_s,
        )
        for world, course in sample.items()
        for number, turn in enumerate(course, start=1)
    ]


def _counted(environment: str) -> list[tuple[str, Seconds, str]]:
    """What is counted: its name, how, and with which uploads."""
    return [
        (f"cluster delay; {environment}", mean_cluster_s, _ACTIVATIONS),
        (f"total, adapters; {environment}", total_s, _ADAPTERS),
        (f"total, activations too; {environment}", total_s, _ACTIVATIONS),
    ]


def _claims(samples: Sequence[Sample]) -> tuple[Claim, ...]:
    environment = ENVIRONMENTS[0]
    return tuple(
        within_a_quarter(
            f"cut against {LABELS[other]}, {text}",
            paper,
            _cut(samples, seconds, environment, uploads, other),
            "%",
        )
        for text, seconds, uploads in _counted(environment)
        for other, paper in _CUTS.items()
    )


def _cut(
    samples: Sequence[Sample], seconds: Seconds, environment: str, uploads: str, other: str
) -> Interval:
    own, against = (plain(name, environment, uploads) for name in (OWN, other))
    return cut(samples, seconds, own, against)


def _of_frameworks(samples: Sequence[Sample]) -> list[Finding]:
    found = []
    for environment in ENVIRONMENTS:
        counted = _counted(environment)
        slowest = (f"slowest cluster; {environment}", slowest_cluster_s, _ACTIVATIONS)
        for text, seconds, uploads in (*counted, slowest):
            for name, label in LABELS.items():
                each = [s[plain(name, environment, uploads)] for s in samples]
                interval = over_seeds([seconds(course) / len(course) for course in each])
                found.append(Finding(f"{label}: {text}, a round", interval, "s"))
                if name != OWN:
                    below = _cut(samples, seconds, environment, uploads, name)
                    found.append(Finding(f"cut against {label}, {text}", below, "%"))
        found += [_broken(samples, name, environment) for name in LABELS]
    return found


def _broken(samples: Sequence[Sample], name: str, environment: str) -> Finding:
    percents = [
        100 * float(np.mean([turn.over_limits / UNITS for turn in s[plain(name, environment)]]))
        for s in samples
    ]
    text = f"{LABELS[name]}: plans that exceed memory or energy; {environment}"
    return Finding(text, share_over_seeds(percents), "%")


def _of_uplinks(samples: Sequence[Sample]) -> list[Finding]:
    return [
        Finding(
            f"cut against VanillaFL, total; {scaled(payload, factor)}",
            against_rival(samples, payload, factor),
            "%",
        )
        for payload in PAYLOADS
        for factor in FACTORS
    ]


def against_rival(samples: Sequence[Sample], payload: str, factor: float) -> Interval:
    """CollaPipe's cut against VanillaFL, both with ``factor`` times the bandwidth, %."""
    rival = scaled(LABELS[RIVAL], factor)
    return cut(samples, total_s, scaled(payload, factor), rival)
