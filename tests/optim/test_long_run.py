"""Runs of many rounds: which units take part, how long rounds take, and how long queues become.

Eight clusters and four channels are drawn as in the paper's Table II. In each round a cluster's
pipeline is up to 10 % faster or slower. Loss-only uses losses that do not depend on the unit.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from collapipe.state import AffineLaw, Channel, DeviceProfile, Uplink
from optim.allocation.exact import exact_allocation
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Partition
from optim.round.channel import links
from optim.round.convergence import idle_gamma, interference_error, next_queues, round_gammas
from optim.round.convergence import scheduled_gamma as scheduled
from optim.round.problem import RoundOptions, RoundProblem
from tests.optim.refutation import verify_round
from tests.thorough import cases

UNITS, CHANNELS, ROUNDS, SEEDS = 8, 4, 40, cases(4, 10)
NOISE_W_PER_HZ = 10**-20.4
Fronts = tuple[tuple[Partition, ...], ...]
Pick = Callable[[np.ndarray, np.random.Generator], list[int]]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The parts of a run that do not change."""

    fronts: Fronts
    uplinks: tuple[Uplink, ...]
    channels: tuple[Channel, ...]

    def jittered(self, rng: np.random.Generator) -> Fronts:
        """Return this round's fronts."""
        factors = rng.uniform(0.9, 1.1, UNITS)
        return tuple(
            tuple(dataclasses.replace(p, latency_s=p.latency_s * factor) for p in front)
            for front, factor in zip(self.fronts, factors.tolist(), strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """The mean round in seconds, the rounds of each unit, and the mean queue after each round."""

    delay_s: float
    counts: np.ndarray
    queues: list[float]


@functools.cache
def scenario(seed: int) -> Scenario:
    """Draw Table II with K = 6, L = 12 and b = 64; units upload adapters of 1.2 MB."""
    rng = np.random.default_rng(seed)
    channels = tuple(
        Channel(float(rng.uniform(4e5, 6e5)), float(rng.uniform(0.06, 0.08)), NOISE_W_PER_HZ)
        for _ in range(CHANNELS)
    )
    uplinks = []
    for _ in range(UNITS):
        gains = 10 ** (rng.uniform(-0.12, -0.08, CHANNELS) / 10)
        uplinks.append(Uplink(0.5, 10.0, 9.44e6, 0.0, tuple(gains.tolist())))
    fronts = tuple(exact_partition(_cluster(rng)).front for _ in range(UNITS))
    return Scenario(fronts, tuple(uplinks), channels)


def _cluster(rng: np.random.Generator) -> ClusterProblem:
    rate = 5e5 * np.log2(1 + 0.085 * 1e-3 / (5e-10 + 5e5 * NOISE_W_PER_HZ))
    hop = float(2 * 64 * 768 * 32 / rate)
    speeds = rng.uniform(10, 24, 6) * rng.uniform(0.1, 0.8, 6) * 1e6
    devices = (
        DeviceProfile(f"device-{k}", AffineLaw(2e6 / speed, 2e6 / speed, 0.0, hop), 6)
        for k, speed in enumerate(speeds.tolist())
    )
    return ClusterProblem(tuple(devices), 12, 64, 64, "bound")


@functools.cache
def planned(seed: int, weight: float, gamma_max: float = 0.84, num_rounds: int = ROUNDS) -> Run:
    """Run rounds that ``exact_allocation`` plans."""
    fixed, rng = scenario(seed), np.random.default_rng(1000 + seed)
    options = RoundOptions(drift_weight=weight, gamma_max=gamma_max, segment_price="paper")
    queues = (0.0,) * UNITS
    counts, delays, means = np.zeros(UNITS), [], []
    for index in range(num_rounds):
        fronts = fixed.jittered(rng)
        problem = RoundProblem(fronts, fixed.uplinks, fixed.channels, queues, 12, options)
        solution = exact_allocation(problem)
        if index % 10 == 0:
            verify_round(solution, problem)
        finish = [each.partition.latency_s + each.upload_s for each in solution.allocations]
        counts[[each.unit for each in solution.allocations]] += 1
        queues = next_queues(queues, round_gammas(problem, solution.allocations), gamma_max)
        delays.append(max(finish))
        means.append(sum(queues) / UNITS)
    return Run(float(np.mean(delays)), counts, means)


def selected(seed: int, pick: Pick) -> Run:
    """Run rounds of the units that a rule picks, with their fastest plans, on channels in order."""
    fixed, rng = scenario(seed), np.random.default_rng(1000 + seed)
    pairs = links(fixed.uplinks, fixed.channels, "none", "all").at(0)
    uploads = pairs.uploads(np.array(0.5))
    counts, delays = np.zeros(UNITS), []
    for _ in range(ROUNDS):
        fastest = np.array([front[-1].latency_s for front in fixed.jittered(rng)])
        units = pick(fastest, rng)
        counts[units] += 1
        delays.append((fastest[units] + uploads[units, range(CHANNELS)]).max())
    return Run(float(np.mean(delays)), counts, [])


RULES: dict[str, Pick] = {
    "random": lambda fastest, rng: rng.choice(UNITS, CHANNELS, replace=False).tolist(),
    "loss": lambda fastest, rng: np.argsort(rng.random(UNITS))[-CHANNELS:].tolist(),
    "delay": lambda fastest, rng: np.argsort(fastest)[:CHANNELS].tolist(),
}


@functools.cache
def against(rule: str, weight: float) -> float:
    """Return the mean over the seeds of our delay divided by the rule's, minus 1."""
    ratios = [
        planned(seed, weight).delay_s / selected(seed, RULES[rule]).delay_s for seed in range(SEEDS)
    ]
    return float(np.mean(ratios)) - 1


def participation(weight: float) -> tuple[float, float]:
    """Return the rounds of the least and the most scheduled unit, as means over the seeds."""
    counts = [planned(seed, weight).counts for seed in range(SEEDS)]
    return float(np.mean([c.min() for c in counts])), float(np.mean([c.max() for c in counts]))


@pytest.mark.parametrize(
    ("weight", "least", "most"),
    [(0.01, (19, 20), (20, 21)), (0.1, (14, 18.5), (21.5, 25.5)), (10.0, (0, 3), (37, 40))],
)
def test_a_larger_weight_makes_participation_less_even(
    weight: float, least: tuple[float, float], most: tuple[float, float]
) -> None:
    """A small V schedules all units alike, and a large V mostly the fast ones."""
    fewest, greatest = participation(weight)
    assert least[0] <= fewest <= least[1]
    assert most[0] <= greatest <= most[1]


@pytest.mark.parametrize(
    ("weight", "random", "delay"),
    [
        (0.01, (-0.08, 0.015), (0.15, 0.36)),
        (0.1, (-0.19, -0.05), (0.07, 0.25)),
        (10.0, (-0.34, -0.13), (-0.03, 0.005)),
    ],
)
def test_delays_compared_with_random_loss_only_and_delay_only(
    weight: float, random: tuple[float, float], delay: tuple[float, float]
) -> None:
    """Rounds are as fast as random ones or faster; loss-only is as fast as random.

    Delay-only is faster at small V, but some units never take part.
    """
    assert random[0] < against("random", weight) < random[1]
    assert against("loss", weight) == pytest.approx(against("random", weight), abs=0.03)
    assert delay[0] < against("delay", weight) < delay[1]
    assert all(selected(seed, RULES["delay"]).counts.min() == 0 for seed in range(SEEDS))


def test_a_larger_weight_is_faster_less_even_and_has_longer_queues() -> None:
    weights = (1e-6, 0.01, 0.1, 10.0)
    delays = [np.mean([planned(s, weight).delay_s for s in range(SEEDS)]) for weight in weights]
    spreads = [np.subtract(*participation(weight)[::-1]) for weight in weights]
    queues = [np.mean([planned(s, weight).queues[-1] for s in range(SEEDS)]) for weight in weights]
    assert delays == sorted(delays, reverse=True)
    assert spreads == sorted(spreads)
    assert queues == sorted(queues)


def test_rounds_with_almost_no_weight_are_slower_than_random_ones() -> None:
    """The queues alone favour the fewest segments."""
    assert 0.2 < against("random", 1e-6) < 0.65


@pytest.mark.parametrize(("share", "grows"), [(0.45, True), (0.6, False)])
def test_queues_are_stable_if_gamma_max_exceeds_the_mean_gamma(share: float, grows: bool) -> None:
    """With ν/N = 1/2, Γ^max must exceed the mean of Γ_idle and Γ_sched at the smallest S."""
    for seed in range(cases(1, 2)):
        fixed, options = scenario(seed), RoundOptions(segment_price="paper")
        idle = idle_gamma(fixed.channels, options)
        fewest = np.array([front[0].num_segments for front in fixed.fronts])
        gains = np.array([uplink.gains for uplink in fixed.uplinks])
        interference = np.array([channel.interference_w for channel in fixed.channels])
        error = interference_error(0.5, gains, interference, options.interference_constant_w)
        busy = float(scheduled(fewest[:, np.newaxis], error, 12, options).mean())
        run = planned(seed, 0.03, busy + share * (idle - busy), 240)
        slope = (run.queues[239] - run.queues[119]) / 120
        if grows:
            expected = (0.5 - share) * (idle - busy)
            assert slope == pytest.approx(expected, rel=0.25)
        else:
            assert abs(slope) < 2e-3
            assert max(run.queues) < 1.5


def test_queues_stay_empty_if_gamma_max_allows_idle_rounds() -> None:
    limit = idle_gamma(scenario(0).channels, RoundOptions())
    assert set(planned(0, 0.03, limit).queues) == {0.0}


def soonest(seed: int) -> Run:
    """Run rounds with the least possible delay, without queues."""
    return planned(seed, 1.0, 1e9)


def excess(weight: float) -> float:
    """Return the mean over the seeds of the delay divided by the least delay, minus 1."""
    ratios = [planned(seed, weight).delay_s / soonest(seed).delay_s for seed in range(SEEDS)]
    assert min(ratios) >= 1 - 1e-9
    return float(np.mean(ratios)) - 1


def test_a_larger_weight_approaches_the_least_possible_delay() -> None:
    """With V = 100 no queue outweighs a second in a run of this length."""
    gaps = [excess(weight) for weight in (0.01, 0.1, 1.0, 10.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert 0.2 < gaps[0] < 0.5
    assert gaps[3] < 1e-3
    assert excess(100.0) < 1e-9


def test_a_small_weight_keeps_queues_bounded_and_participation_fair() -> None:
    """Over 160 rounds queues do not grow in the second half, and units take part in 48 % to 52 %.

    All numbers are means over the seeds.
    """
    runs = [planned(seed, 0.01, num_rounds=160) for seed in range(SEEDS)]
    queues = np.mean([run.queues for run in runs], axis=0)
    assert queues[80:].mean() < queues[40:80].mean() * 1.02
    assert queues.max() < 0.3
    shares = np.array([run.counts for run in runs]) / 160
    assert np.mean(shares.min(axis=1)) > 0.48
    assert np.mean(shares.max(axis=1)) < 0.52
