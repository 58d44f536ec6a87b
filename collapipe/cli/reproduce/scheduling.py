"""Rounds in which J of N units take part, under DSSRA and under rules that look at one thing.

All see the same clusters, and each scheduled unit gets the channel and power that end the round
soonest, so that strategies differ in whom they choose and in how blocks are split.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from collapipe.cli.reproduce.worlds import (
    BERT_BLOCKS,
    paper_world,
    problem,
    solved,
    solved_or_unlimited,
    stream,
)
from collapipe.state import Channel, DeviceProfile, Uplink
from optim.convergence import next_queues, round_gammas
from optim.problem import Partition, RoundOptions, RoundProblem, RoundSolution
from optim.solvers import cluster_solver, round_solver
from optim.verify import verify_round

UNITS = 8  # N; J is the preset's number of channels
JITTER = 0.1  # of a device's compute time, in each round


@dataclass(frozen=True, slots=True)
class Moment:
    """What is drawn for a round.

    Attributes
    ----------
    fronts
        Of the N clusters, exact.
    even
        Of their even splits over all devices, m = 8.
    order
        The units in a random order.
    losses
        Drawn anew in every round, since nothing is trained here.
    """

    fronts: tuple[tuple[Partition, ...], ...]
    even: tuple[tuple[Partition, ...], ...]
    order: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Radio:
    """The channels and uplinks of all rounds."""

    channels: tuple[Channel, ...]
    uplinks: tuple[Uplink, ...]

    def without_activations(self) -> "Radio":
        """Units upload adapters alone."""
        uplinks = (dataclasses.replace(each, activation_bits=0.0) for each in self.uplinks)
        return Radio(self.channels, tuple(uplinks))


@dataclass
class Course:
    """What a strategy's rounds have come to.

    Attributes
    ----------
    delays_s
        Of each round: the longest pipeline and upload of its units.
    rounds
        In how many each unit took part.
    queues
        Y_n after the last round; 0 where no queues are kept.
    """

    delays_s: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=lambda: [0] * UNITS)
    queues: tuple[float, ...] = (0.0,) * UNITS

    def add(self, solution: RoundSolution) -> None:
        """Count a round."""
        taken = solution.allocations
        self.delays_s.append(max(each.partition.latency_s + each.upload_s for each in taken))
        for each in taken:
            self.rounds[each.unit] += 1


class Strategy(Protocol):
    """Takes a course one round further."""

    def step(self, course: Course, moment: Moment, radio: Radio) -> None:
        """Plan the round, verify the plan, and count it."""


@dataclass(frozen=True, slots=True)
class Dssra:
    """The joint round with drift ``gamma`` under ``weight`` V, and its queues (eq. 29)."""

    weight: float

    def step(self, course: Course, moment: Moment, radio: Radio) -> None:
        """See ``Strategy``."""
        asked = _asked(moment.fronts, course.queues, radio, self.weight)
        solution = _solved(asked)
        course.add(solution)
        gammas = round_gammas(asked, solution.allocations)
        course.queues = next_queues(course.queues, gammas, asked.options.gamma_max)


@dataclass(frozen=True, slots=True)
class Rule:
    """The J units that ``choose`` takes; ``even``: blocks split evenly."""

    choose: Callable[[Moment, int], Sequence[int]]
    even: bool = False

    def step(self, course: Course, moment: Moment, radio: Radio) -> None:
        """See ``Strategy``; without queues the delay is all that the round minimises."""
        seen = dataclasses.replace(moment, fronts=moment.even) if self.even else moment
        chosen = set(self.choose(seen, len(radio.channels)))
        fronts = tuple(front if unit in chosen else () for unit, front in enumerate(seen.fronts))
        course.add(_solved(_asked(fronts, course.queues, radio, 1.0)))


def at_random(moment: Moment, count: int) -> Sequence[int]:
    """The first in a random order."""
    return moment.order[:count]


def highest_loss(moment: Moment, count: int) -> Sequence[int]:
    """Those with the highest loss."""
    return sorted(range(UNITS), key=lambda unit: -moment.losses[unit])[:count]


def shortest_delay(moment: Moment, count: int) -> Sequence[int]:
    """Those with the fastest pipelines."""
    return sorted(range(UNITS), key=lambda unit: moment.fronts[unit][-1].latency_s)[:count]


def courses(
    seed: int, rounds: int, strategies: Sequence[Strategy], radios: Sequence[Radio]
) -> list[list[Course]]:
    """One seed's courses, for each radio those of all strategies."""
    devices = [paper_world().devices(seed, unit) for unit in range(UNITS)]
    found = [[Course() for _ in strategies] for _ in radios]
    for number in range(rounds):
        moment = _moment(devices, stream(seed, "round", number))
        for radio, row in zip(radios, found, strict=True):
            for strategy, course in zip(strategies, row, strict=True):
                strategy.step(course, moment, radio)
    return found


def radio(seed: int) -> Radio:
    """One seed's channels and uplinks."""
    return Radio(*paper_world().radio(seed, UNITS))


def _moment(devices: Sequence[tuple[DeviceProfile, ...]], rng: np.random.Generator) -> Moment:
    clusters = [
        problem([_jittered(device, rng) for device in each], BERT_BLOCKS) for each in devices
    ]
    exact, even = cluster_solver("exact"), cluster_solver("pipeline")
    return Moment(
        tuple(solved(exact, cluster, rng).front for cluster in clusters),
        tuple(solved_or_unlimited(even, cluster, rng)[0].front for cluster in clusters),
        tuple(rng.permutation(UNITS).tolist()),
        tuple(rng.random(UNITS).tolist()),
    )


def _jittered(device: DeviceProfile, rng: np.random.Generator) -> DeviceProfile:
    factor = rng.uniform(1 - JITTER, 1 + JITTER)
    law = dataclasses.replace(device.time, u=device.time.u * factor, v=device.time.v * factor)
    return dataclasses.replace(device, time=law)


def _asked(
    fronts: tuple[tuple[Partition, ...], ...],
    queues: tuple[float, ...],
    radio: Radio,
    weight: float,
) -> RoundProblem:
    constant = paper_world().channel.interference_constant_w
    options = RoundOptions(drift_weight=weight, interference_constant_w=constant)
    return RoundProblem(fronts, radio.uplinks, radio.channels, queues, BERT_BLOCKS, options)


def _solved(asked: RoundProblem) -> RoundSolution:
    solution = round_solver("exact")(asked)
    verify_round(solution, asked)
    return solution
