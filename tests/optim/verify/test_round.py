"""A correct round passes; each planted fault is reported with its constraint and the numbers."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar

from collapipe.errors import PlanViolationError
from collapipe.plan import Certificate
from collapipe.state import Channel, Uplink
from optim.allocation.exact import exact_allocation
from optim.problem import Partition
from optim.round.problem import Allocation, RoundOptions, RoundProblem, RoundSolution
from tests.optim.refutation import verify_round


def certified(objective: float, lower_bound: float | None = None) -> Certificate:
    """Return a certificate; by default its lower bound is the objective."""
    bound = objective if lower_bound is None else lower_bound
    return Certificate(objective, bound, "by hand", 0.0)


# Computed by hand: three units and two channels. I + B·N_0 = 1 W, so that with 1 W the rates are
# log2(1 + h) = 2 and 3 bit/s, and 6 bits take 3 and 2 s. A third of the bits are activations. With
# m = 2 half of these are sent before the pipeline ends at 15 s, and half after. Unit 0 ends after
# 15 + 0.5 + 2 s, unit 1 after 15 + 1/3 + 4/3 s. Unit 2's cluster cannot hold the model. On each
# other's channel units 0 and 1 would need at least 4·ln 2 = 2.77 J, but have only 2.5 J.
# Γ_0 = 0.3·4/3 + 0.7/3.5 + 0.3 = 0.9, Γ_1 = 0.4 + 0.7/7.5 + 0.3; idle it is 0.7/0.5 + 0.3 = 1.7.

ALONE, BOTH = Partition((0, 0, 3), 1, 36.0, 36.0), Partition((2, 1, 0), 2, 15.0, 5.0)
UPLINKS = (
    Uplink(1.0, 2.5, 4.0, 2.0, (3.0, 1.0)),
    Uplink(1.0, 2.5, 4.0, 2.0, (1.0, 7.0)),
    Uplink(1.0, 2.5, 4.0, 2.0, (7.0, 7.0)),
)
CHANNELS = (Channel(1.0, 0.5, 0.5), Channel(1.0, 0.5, 0.5))
OPTIONS = RoundOptions(
    drift_weight=0.1, kappa=1.0, gradient_bound=0.3, interference_constant_w=0.7, gamma_max=0.9,
    energy="adapters", segment_price="paper",
)  # fmt: skip
ROUND = RoundProblem(
    ((ALONE, BOTH), (ALONE, BOTH), ()), UPLINKS, CHANNELS, (1.0, 2.0, 3.0), 3, OPTIONS
)
FIRST = Allocation(0, 0, 1.0, 3.0, 17.5, BOTH)
SECOND = Allocation(1, 1, 1.0, 2.0, 15 + 5 / 3, BOTH)
BEST = 0.1 * 17.5 + 1 * 0.9 + 2 * (0.7 + 0.7 / 7.5) + 3 * 1.7
ANSWER = RoundSolution((FIRST, SECOND), certified(BEST))
PAPER = replace(OPTIONS, drift="paper")


def test_a_round_made_by_hand_passes() -> None:
    """The drift is Γ, or S + p, or Γ with a limit that unit 0 just meets."""
    verify_round(ANSWER, ROUND)
    verify_round(ANSWER, replace(ROUND, options=replace(OPTIONS, hard_gamma=True)))
    paper = RoundSolution((FIRST, SECOND), certified(1.75 + 1 * 3 + 2 * 3, 0.0))
    verify_round(paper, replace(ROUND, options=PAPER))


def test_finish_times_of_uploads_after_the_pipeline_and_of_slow_ones() -> None:
    """Uploads after the pipelines end after 15 + 3 s and 15 + 2 s.

    If a streamed upload is slower than its pipeline, the upload determines the end.
    """
    waits = with_options(uplink="after")
    given = replace(FIRST, finish_s=18.0), replace(SECOND, finish_s=17.0)
    verify_round(RoundSolution(given, certified(BEST + 0.05)), waits)
    # 32 bits of activations: each half takes 8 s, and the second begins when the first is sent.
    slow = with_uplink(activation_bits=32.0)
    given = replace(FIRST, upload_s=18.0, finish_s=10.0 + 8 + 8 + 2), SECOND
    verify_round(RoundSolution(given, certified(BEST + 1.05, 0.0)), slow)


def given_to(first: Allocation, second: Allocation = SECOND) -> RoundSolution:
    """Return allocations whose objective is not checked, because another fault is found first."""
    return RoundSolution((first, second), certified(BEST))


def with_options(**changes: Any) -> RoundProblem:
    """Return the round with changed options."""
    return replace(ROUND, options=replace(OPTIONS, **changes))


def with_uplink(**changes: Any) -> RoundProblem:
    """Return the round with a changed uplink of unit 0."""
    return replace(ROUND, uplinks=(replace(UPLINKS[0], **changes), *UPLINKS[1:]))


ROUND_FAULTS: list[tuple[str, RoundSolution, RoundProblem]] = [
    ("C3: unit 3: the problem has 3 units", given_to(replace(FIRST, unit=3)), ROUND),
    ("C3: unit 0 on channel 2: the problem has 2", given_to(replace(FIRST, channel=2)), ROUND),
    ("C3: unit 0 on channel -1: the problem has 2", given_to(replace(FIRST, channel=-1)), ROUND),
    ("C4: unit 0 on channel 1 and on 0", given_to(FIRST, replace(FIRST, channel=1)), ROUND),
    ("C5: channel 0 for unit 1 and for 0", given_to(FIRST, replace(SECOND, channel=0)), ROUND),
    ("order: unit 0 follows unit 1, units must ascend", given_to(SECOND, FIRST), ROUND),
    (r"C1: unit 0: blocks \(1, 2, 0\) are not a point",
     given_to(replace(FIRST, partition=replace(BOTH, blocks=(1, 2, 0)))), ROUND),
    (r"C1: unit 2: .* are not a point of", given_to(FIRST, replace(SECOND, unit=2)), ROUND),
    ("C6: unit 0 on channel 0 sends with 1.01 W of 1 W", given_to(replace(FIRST, power_w=1.01)),
     ROUND),
    ("C6: unit 0 on channel 0 sends with -0.1 W", given_to(replace(FIRST, power_w=-0.1)), ROUND),
    ("C6: unit 0 on channel 0 sends with nan W", given_to(replace(FIRST, power_w=math.nan)), ROUND),
    ("C8: unit 0 on channel 0 sends 2 J, its limit is 1.9 J", ANSWER, with_uplink(energy_j=1.9)),
    ("C8: unit 0 on channel 0 sends 3 J, its limit is 2.5 J", ANSWER, with_options(energy="all")),
    ("upload time: 2.9 s for unit 0 on channel 0 with 1 W; eq. 11 gives 3 s",
     given_to(replace(FIRST, upload_s=2.9)), ROUND),
    ("upload time: 3 s for unit 0 on channel 0 with 0.5 W",
     given_to(replace(FIRST, power_w=0.5)), ROUND),
    ("upload time: inf s .* gives inf s",
     given_to(replace(FIRST, power_w=0.0, upload_s=math.inf)), ROUND),
    ("finish: 17.4 s for unit 0 on channel 0, expected 17.5 s",
     given_to(replace(FIRST, finish_s=17.4)), ROUND),
    ("finish: 18 s for unit 0 on channel 0, expected 17.5 s",
     given_to(replace(FIRST, finish_s=18.0)), ROUND),
    ("finish: 17.5 s for unit 0 on channel 0, expected 18 s", ANSWER, with_options(uplink="after")),
    ("finish: 16.6666.* s for unit 1 on channel 1, expected 17 s",
     given_to(replace(FIRST, finish_s=18.0)), with_options(uplink="after")),
    ("finish: nan s", given_to(replace(FIRST, finish_s=math.nan)), ROUND),
    (r"C1: unit 0: blocks \(2, 1, 0\) are not a point",
     given_to(replace(FIRST, partition=replace(BOTH, slowest_s=4.0))), ROUND),
    ("C11: unit 0 on channel 0 has Γ=0.9, the limit is 0.89", ANSWER,
     with_options(hard_gamma=True, gamma_max=0.89)),
    ("C4: 1 units have a channel, 2 feasible pairs", replace(ANSWER, allocations=(FIRST,)), ROUND),
    ("C4: no unit has a channel", replace(ANSWER, allocations=()), ROUND),
    ("objective: certified as 9.3, expected 9.336666", replace(ANSWER, certificate=certified(9.3)),
     ROUND),
    ("objective: certified as 9.336666.*, expected 12.336666", ANSWER,
     replace(ROUND, queues=(1.0, 2.0, 3.0 + 3 / 1.7))),
    ("objective: certified as 9.336666.*, expected 10.75", ANSWER, replace(ROUND, options=PAPER)),
    ("lower bound: 9.4, the objective is 9.3366", replace(ANSWER, certificate=certified(BEST, 9.4)),
     ROUND),
    ("lower bound: inf", replace(ANSWER, certificate=certified(BEST, math.inf)), ROUND),
]  # fmt: skip


@pytest.mark.parametrize(("message", "solution", "problem"), ROUND_FAULTS)
def test_each_fault_of_a_round_is_named(
    message: str, solution: RoundSolution, problem: RoundProblem
) -> None:
    with pytest.raises(PlanViolationError, match=f"^{message}") as caught:
        verify_round(solution, problem)
    assert "\n" not in str(caught.value)


FADING = replace(OPTIONS, fading="rayleigh")


def mean_rate(channel: Channel, gain: float, power_w: float) -> float:
    """Return eq. 10 by adaptive quadrature over the gain."""
    snr = power_w * gain / (channel.interference_w + channel.bandwidth_hz * channel.noise_w_per_hz)
    nats, _ = quad(lambda g: math.exp(-g) * math.log1p(snr * g), 0, 1, epsabs=0, epsrel=1e-12)
    tail, _ = quad(lambda g: math.exp(-g) * math.log1p(snr * g), 1, math.inf, epsabs=0)
    return channel.bandwidth_hz * (nats + tail) / math.log(2)


@pytest.mark.parametrize("power_w", [1e-7, 1e-3, 1.0, 1e3, 1e7])
def test_fading_rates_are_expectations(power_w: float) -> None:
    """A single unit is verified over 14 orders of magnitude of the signal-to-noise ratio."""
    uplink = Uplink(power_w, 1e15, 4.0, 2.0, (1.0,))
    problem = replace(
        ROUND, fronts=((BOTH,),), uplinks=(uplink,), channels=CHANNELS[:1], queues=(0.0,),
        options=FADING,
    )  # fmt: skip
    upload_s = 6 / mean_rate(CHANNELS[0], 1.0, power_w)
    finish_s = ends_s(BOTH, upload_s / 3, upload_s * 2 / 3, "streamed")
    given = Allocation(0, 0, power_w, upload_s, finish_s, BOTH)
    verify_round(RoundSolution((given,), certified(0.1 * finish_s)), problem)
    for late, message in (
        (replace(given, upload_s=upload_s * (1 + 1e-8)), "^upload time"),
        (replace(given, finish_s=finish_s * (1 + 1e-8)), "^finish"),
    ):
        with pytest.raises(PlanViolationError, match=message):
            verify_round(RoundSolution((late,), certified(0.1 * finish_s)), problem)


def ends_s(point: Partition, activation_s: float, model_s: float, uplink: str) -> float:
    """Return when all data is sent; a micro-batch is sent once it has left the pipeline."""
    m, sent_s = point.num_micro_batches, 0.0
    for place in range(m):
        left_s = point.latency_s - (m - 1 - place) * point.slowest_s
        if uplink == "after":
            left_s = point.latency_s
        sent_s = max(sent_s, left_s) + activation_s / m
    return sent_s + model_s


def test_a_round_with_fewer_units_than_possible_is_refused() -> None:
    """Unit 0 can use both channels, unit 1 only the channel that unit 0 has."""
    rich = replace(UPLINKS[0], energy_j=10.0)
    problem = replace(ROUND, uplinks=(rich, replace(UPLINKS[1], gains=(7.0, 1e-3)), UPLINKS[2]))
    alone = RoundSolution((FIRST,), certified(BEST))
    with pytest.raises(PlanViolationError, match=r"^C4: 1 units have a channel, 2 feasible pairs"):
        verify_round(alone, problem)


FIXED = replace(ROUND, fronts=((BOTH,), (ALONE,), ()))  # S = 2 for unit 0, S = 1 for unit 1
HARD = replace(OPTIONS, hard_gamma=True)
POOR = with_uplink(energy_j=1.9).uplinks


@pytest.mark.parametrize(
    ("infeasible", "feasible"),
    [
        (with_uplink(max_power_w=0.0), ROUND),
        (with_uplink(gains=(0.0, 0.0)), ROUND),
        # A bit costs at least ln 2/3 J, and four bits 0.924 J.
        (with_uplink(energy_j=0.92), with_uplink(energy_j=0.93)),
        (replace(ROUND, fronts=((), (ALONE, BOTH), ())), ROUND),
        # Γ_0 = 0.9 at 1 W.
        (
            replace(FIXED, options=replace(HARD, gamma_max=0.89)),
            replace(FIXED, options=replace(HARD, gamma_max=0.9001)),
        ),
        # Γ_0 ≥ 0.7 at any power.
        (
            replace(FIXED, options=replace(HARD, gamma_max=0.69, interference_constant_w=0.0)),
            replace(FIXED, options=replace(HARD, gamma_max=0.71, interference_constant_w=0.0)),
        ),
        # Γ_0 = 0.9 needs 1 W and 2 J; Γ_0 = 1 needs 0.61 W and 1.63 J.
        (
            replace(FIXED, options=HARD, uplinks=POOR),
            replace(FIXED, options=replace(HARD, gamma_max=1.0), uplinks=POOR),
        ),
    ],
    ids=["power", "gain", "energy", "front", "Γ", "Γ at any power", "energy for Γ"],
)
def test_only_a_unit_that_can_use_no_channel_may_be_left_out(
    infeasible: RoundProblem, feasible: RoundProblem
) -> None:
    allocations = (_allocated(infeasible, 1, 1, 1.0, infeasible.fronts[1][-1]),)
    verify_round(RoundSolution(allocations, certified(price(infeasible, allocations))), infeasible)
    with pytest.raises(PlanViolationError, match=r"^C4: 1 units have a channel, 2 feasible pairs"):
        verify_round(RoundSolution(allocations, certified(0.0)), feasible)


# Each answer is feasible and has its true objective, but a neighbour is better.


def sure(seconds: float) -> tuple[Partition, ...]:
    """Return a front of one point."""
    return (Partition((3,), 1, seconds, seconds),)


def simple_round(gains: tuple[tuple[float, ...], ...], **changes: Any) -> RoundProblem:
    """Return units with much energy, clusters that take 10 s, and queues of 0."""
    uplinks = tuple(Uplink(1.0, 100.0, 4.0, 2.0, row) for row in gains)
    problem = RoundProblem(
        (sure(10.0),) * len(gains), uplinks, (CHANNELS * 2)[: len(gains[0])],
        (0.0,) * len(gains), 3, OPTIONS,
    )  # fmt: skip
    return replace(problem, **changes)


def priced(problem: RoundProblem, *places: tuple[int, int, float]) -> RoundSolution:
    """Return units on channels with powers and the last points of their fronts, certified as
    optimal."""
    allocations, drift = [], 0.0
    for unit, channel, power_w in places:
        uplink, band = problem.uplinks[unit], problem.channels[channel]
        signal = power_w * uplink.gains[channel]
        noise = band.interference_w + band.bandwidth_hz * band.noise_w_per_hz
        rate = band.bandwidth_hz * math.log2(1 + signal / noise)
        point = problem.fronts[unit][-1]
        activation_s, model_s = uplink.activation_bits / rate, uplink.model_bits / rate
        times = activation_s + model_s, ends_s(point, activation_s, model_s, "streamed")
        allocations.append(Allocation(unit, channel, power_w, *times, point))
        held, options = point.num_segments, problem.options
        gamma = held**2 / 3 * 0.3 + 0.7 / (signal + band.interference_w) + 0.3
        drift += problem.queues[unit] * (gamma if options.drift == "gamma" else held + power_w)
    if problem.options.drift == "gamma":
        scheduled = {unit for unit, _, _ in places}
        idle = [queue for unit, queue in enumerate(problem.queues) if unit not in scheduled]
        drift += 1.7 * sum(idle)
    makespan = max(given.finish_s for given in allocations)
    return RoundSolution(tuple(allocations), certified(0.1 * makespan + drift))


SPREAD = ((3.0, 1.0), (1.0, 3.0))
UNEVEN = simple_round(SPREAD, fronts=((*sure(40.0), Partition((1, 2), 1, 38.0, 20.0)), sure(10.0)))
REFUTED: list[tuple[str, RoundProblem, list[tuple[int, int, float]]]] = [
    ("power", simple_round(((3.0,),)), [(0, 0, 0.2)]),
    ("unit", simple_round(((1.0,), (3.0,))), [(0, 0, 1.0)]),
    ("unit with a queue", simple_round(((3.0,), (3.0,)), queues=(1.0, 2.0)), [(0, 0, 1.0)]),
    ("channel", simple_round(((1.0, 3.0),)), [(0, 0, 1.0)]),
    ("partition", replace(UNEVEN, queues=(10.0, 0.0)), [(0, 0, 1.0), (1, 1, 1.0)]),
    ("swap", simple_round(SPREAD, queues=(9.0, 9.0)), [(0, 1, 1.0), (1, 0, 1.0)]),
    ("power in the drift", simple_round(((3.0,),), queues=(9.0,), options=PAPER), [(0, 0, 1.0)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "places"), [case[1:] for case in REFUTED], ids=[case[0] for case in REFUTED]
)
def test_a_lower_bound_above_another_round_is_refused(
    problem: RoundProblem, places: list[tuple[int, int, float]]
) -> None:
    solution = priced(problem, *places)
    modest = replace(solution, certificate=replace(solution.certificate, lower_bound=0.0))
    verify_round(modest, problem)
    with pytest.raises(PlanViolationError, match=r"^lower bound: .*, but .* gives "):
        verify_round(solution, problem)


# Random rounds solved by enumeration, of which one field is then corrupted.


def random_round(rng: np.random.Generator, options: RoundOptions) -> RoundProblem:
    """Draw up to three units, two channels and two points per front; energy is often scarce."""
    num_units, num_channels = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    channels = tuple(Channel(*rng.uniform(0.5, 2.0, 3)) for _ in range(num_channels))
    uplinks = tuple(
        Uplink(
            rng.uniform(0.5, 2.0), rng.uniform(0.3, 9.0), rng.uniform(1.0, 6.0),
            rng.uniform(0.0, 6.0), tuple(rng.uniform(0.2, 8.0, num_channels)),
        )
        for _ in range(num_units)
    )  # fmt: skip
    slow, fast = rng.uniform(20.0, 40.0, num_units), rng.uniform(5.0, 20.0, num_units)
    # The slowest of the stages takes a third to a half of the sum of all stages.
    paces = fast / rng.uniform(3.0, 4.0, num_units)
    fronts = tuple(
        (Partition((3, 0), 1, alone, alone), Partition((1, 2), 2, both, pace))
        for alone, both, pace in zip(slow.tolist(), fast.tolist(), paces.tolist(), strict=True)
    )
    queues = tuple(rng.uniform(0.0, 5.0, num_units))
    chosen = {"uplink": ["streamed", "after"], "energy": ["all", "adapters"]}
    options = replace(options, **{name: str(rng.choice(some)) for name, some in chosen.items()})
    return RoundProblem(fronts, uplinks, channels, queues, 3, options)


def rate_of(problem: RoundProblem, unit: int, channel: int, power_w: float) -> float:
    """Return eq. 10."""
    band, gain = problem.channels[channel], problem.uplinks[unit].gains[channel]
    if problem.options.fading == "rayleigh":
        return mean_rate(band, gain, power_w)
    noise = band.interference_w + band.bandwidth_hz * band.noise_w_per_hz
    return band.bandwidth_hz * math.log1p(power_w * gain / noise) / math.log(2)


def largest_power(problem: RoundProblem, unit: int, channel: int) -> float | None:
    """Return the largest power by a root of eq. 12; None if no power is small enough."""
    uplink = problem.uplinks[unit]
    bits = uplink.model_bits + uplink.activation_bits * (problem.options.energy == "all")

    def excess(power_w: float) -> float:
        rate = rate_of(problem, unit, channel, power_w)
        return power_w * bits / rate - uplink.energy_j

    if excess(1e-9) > 0:
        return None
    if excess(uplink.max_power_w) <= 0:
        return uplink.max_power_w
    return float(brentq(excess, 1e-9, uplink.max_power_w, xtol=1e-15, rtol=1e-14))


def gamma_of(problem: RoundProblem, given: Allocation) -> float:
    """Return eq. 28."""
    options, gain = problem.options, problem.uplinks[given.unit].gains[given.channel]
    received = given.power_w * gain + problem.channels[given.channel].interference_w
    spread = options.gradient_bound * given.partition.num_segments**2 / problem.num_blocks
    return options.kappa * (
        spread + options.interference_constant_w / received + options.gradient_bound
    )


def price(problem: RoundProblem, allocations: tuple[Allocation, ...]) -> float:
    """Return the objective by definition."""
    options = problem.options
    objective = options.drift_weight * max(given.finish_s for given in allocations)
    mean = sum(channel.interference_w for channel in problem.channels) / len(problem.channels)
    idle = options.kappa * (options.interference_constant_w / mean + options.gradient_bound)
    scheduled = {given.unit: given for given in allocations}
    for unit, queue in enumerate(problem.queues):
        given = scheduled.get(unit)
        if options.drift == "gamma":
            objective += queue * (gamma_of(problem, given) if given else idle)
        elif given:
            objective += queue * (given.partition.num_segments + given.power_w)
    return objective


def candidates(problem: RoundProblem) -> Iterator[tuple[Allocation, ...]]:
    """Yield every largest matching at the largest powers, with every partition."""
    shape = (len(problem.uplinks), len(problem.channels))
    limits = {pair: largest_power(problem, *pair) for pair in np.ndindex(shape)}
    feasible = [pair for pair, limit in limits.items() if limit is not None]
    for size in range(min(shape), 0, -1):
        matchings = [
            pairs
            for pairs in itertools.combinations(feasible, size)
            if len({n for n, _ in pairs}) == len({j for _, j in pairs}) == size
        ]
        for pairs in matchings:
            for points in itertools.product(*(problem.fronts[n] for n, _ in pairs)):
                yield tuple(
                    _allocated(problem, n, j, limits[n, j] or 0.0, point)
                    for (n, j), point in zip(pairs, points, strict=True)
                )
        if matchings:
            return


def _allocated(
    problem: RoundProblem, unit: int, channel: int, power_w: float, point: Partition
) -> Allocation:
    uplink, rate = problem.uplinks[unit], rate_of(problem, unit, channel, power_w)
    activation_s, model_s = uplink.activation_bits / rate, uplink.model_bits / rate
    finish_s = ends_s(point, activation_s, model_s, problem.options.uplink)
    return Allocation(unit, channel, power_w, activation_s + model_s, finish_s, point)


def corrupted_rounds(
    solution: RoundSolution, problem: RoundProblem, rng: np.random.Generator
) -> Iterator[RoundSolution]:
    """Yield answers with one change each that makes them wrong."""
    chosen, objective = solution.allocations, solution.certificate.objective
    place = int(rng.integers(len(chosen)))
    given, factor = chosen[place], 1 + rng.choice([-1, 1]) * 10.0 ** rng.uniform(-8, -1)
    uplink = problem.uplinks[given.unit]
    for changed in (
        replace(given, unit=len(problem.uplinks)),
        replace(given, channel=len(problem.channels)),
        replace(given, power_w=given.power_w * factor),
        replace(given, power_w=uplink.max_power_w * (1 + abs(factor - 1))),
        replace(given, upload_s=given.upload_s * factor),
        replace(given, finish_s=given.finish_s * factor),
        replace(given, partition=replace(given.partition, latency_s=1.0)),
        replace(given, partition=replace(given.partition, slowest_s=1.0)),
    ):
        rest = (*chosen[:place], changed, *chosen[place + 1 :])
        yield RoundSolution(rest, solution.certificate)
    yield replace(solution, allocations=(*chosen[:place], *chosen[place + 1 :]))
    yield replace(solution, allocations=(*chosen, given))
    yield replace(solution, certificate=certified(objective * factor, 0.0))
    yield replace(solution, certificate=certified(objective, objective * (1 + abs(factor - 1))))


@pytest.mark.parametrize("options", [OPTIONS, FADING], ids=["steady", "fading"])
@given(st.integers(0, 2**32))
def test_a_correct_round_passes_and_a_corrupted_one_does_not(
    options: RoundOptions, seed: int
) -> None:
    """No neighbour refutes the optimum, which is certified without a gap."""
    rng = np.random.default_rng(seed)
    problem = random_round(rng, options)
    best = min(candidates(problem), key=lambda chosen: price(problem, chosen), default=None)
    if best is None:
        return
    solution = RoundSolution(best, certified(price(problem, best)))
    verify_round(solution, problem)
    for spoilt in corrupted_rounds(solution, problem, rng):
        with pytest.raises(PlanViolationError):
            verify_round(spoilt, problem)


@given(st.integers(0, 2**32))
def test_correct_rounds_without_a_bound_pass_under_both_drifts(seed: int) -> None:
    """The rounds may be far from the optimum."""
    rng = np.random.default_rng(seed)
    drift = replace(OPTIONS, drift="paper" if rng.random() < 0.5 else "gamma")
    problem = random_round(rng, drift)
    for chosen in itertools.islice(candidates(problem), 20):
        weaker = tuple(
            _allocated(problem, c.unit, c.channel, c.power_w * rng.uniform(0.1, 1), c.partition)
            for c in chosen
        )
        verify_round(RoundSolution(weaker, certified(price(problem, weaker), 0.0)), problem)


@given(st.integers(0, 2**32))
def test_no_neighbour_refutes_the_best_power_of_the_papers_drift(seed: int) -> None:
    """There is one channel. A bounded search finds the best power of each unit and partition."""
    rng = np.random.default_rng(seed)
    problem = random_round(rng, PAPER)
    problem = replace(problem, channels=problem.channels[:1])
    best, bound = None, math.inf
    for (strongest,) in candidates(problem):

        def spend(power_w: float, strongest: Allocation = strongest) -> tuple[Allocation, ...]:
            return (_allocated(problem, strongest.unit, 0, power_w, strongest.partition),)

        limits = (1e-6, strongest.power_w)
        found = minimize_scalar(lambda p, spend=spend: price(problem, spend(p)), bounds=limits)
        for power_w in (float(found.x), strongest.power_w):
            if price(problem, spend(power_w)) < bound:
                best, bound = spend(power_w), price(problem, spend(power_w))
    if best is not None:
        # The found value differs from the optimum by the square of the search's tolerance.
        verify_round(RoundSolution(best, certified(bound, bound * (1 - 1e-8))), problem)


@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_units_without_gain_or_power_are_not_scheduled(drift: str) -> None:
    """One of them has no bits to send, so that its upload would take no time and no energy."""
    options = replace(OPTIONS, drift=drift)
    silent = (Uplink(1.0, 2.5, 0.0, 0.0, (0.0, 0.0)), Uplink(0.0, 2.5, 0.0, 2.0, (3.0, 1.0)))
    problem = replace(
        ROUND,
        fronts=((BOTH,), (replace(BOTH, latency_s=1.0),), (replace(BOTH, latency_s=1.0),)),
        uplinks=(UPLINKS[0], *silent),
        queues=(0.0, 0.0, 0.0),
        options=options,
    )
    solution = exact_allocation(problem)
    assert [each.unit for each in solution.allocations] == [0]
    verify_round(solution, problem)
