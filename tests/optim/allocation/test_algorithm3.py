"""Algorithm 3: matching and power are optimal for eq. 35, and every answer is feasible."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError
from collapipe.state import Channel, Uplink
from optim.allocation.algorithm3 import Senders, controlled_power, match_channels, paper_allocation
from optim.allocation.exact import exact_allocation
from optim.problem import Partition
from optim.round.channel import Links
from optim.round.problem import RoundOptions, RoundProblem, RoundSolution
from tests.optim import rounds
from tests.optim.refutation import verify_round
from tests.thorough import cases, chosen

Floats = np.ndarray
NUM_BLOCKS = 12


def front(rng: np.random.Generator, streamed: bool) -> tuple[Partition, ...]:
    """Draw one to four points of S = 1 … 4; uploads wait for the pipeline unless ``streamed``."""
    latencies = sorted(rng.uniform(30, 90, rng.integers(1, 5)), reverse=True)
    if streamed:
        return tuple(
            rounds.point_of(rng, segments, float(latency))
            for segments, latency in enumerate(latencies, start=1)
        )
    return tuple(
        Partition((NUM_BLOCKS - s, *[1] * s, *[0] * (3 - s)), 4, float(latency))
        for s, latency in enumerate(latencies)
    )


def round_problem(
    seed: int, num_units: int, num_channels: int, streamed: bool = False, **options: Any
) -> RoundProblem:
    """Draw a round with uplinks like Table II's; some lack the energy for any power."""
    rng = np.random.default_rng(seed)
    channels = tuple(
        Channel(float(rng.uniform(0.4e6, 0.6e6)), float(rng.uniform(0.06, 0.08)), 4e-21)
        for _ in range(num_channels)
    )
    uplinks = tuple(
        Uplink(
            max_power_w=0.5,
            energy_j=float(rng.choice([0.6, 1.5, 4.0])),
            model_bits=1e7,
            activation_bits=float(rng.choice([0.0, 1e8])),
            gains=tuple(float(gain) for gain in rng.uniform(0.2, 1, num_channels)),
        )
        for _ in range(num_units)
    )
    fronts = tuple(front(rng, streamed) if rng.random() < 0.9 else () for _ in range(num_units))
    queues = tuple(float(queue) for queue in rng.uniform(0, 5, num_units))
    round_options = RoundOptions(**{"energy": "adapters", "segment_price": "paper", **options})
    return RoundProblem(fronts, uplinks, channels, queues, NUM_BLOCKS, round_options)


def solved(problem: RoundProblem) -> RoundSolution | None:
    """Return the verified answer; None if the round is infeasible."""
    try:
        solution = paper_allocation(problem)
    except InfeasibleRoundError:
        return None
    verify_round(solution, problem)
    assert solution.certificate.solver == "paper"
    assert solution.certificate.lower_bound == 0
    return solution


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
@pytest.mark.parametrize(
    ("num_units", "num_channels"), chosen([(4, 2), (2, 4), (3, 1)], [(4, 2), (3, 1)])
)
@pytest.mark.parametrize("streamed", [False, True])
def test_answers_are_feasible_and_not_better_than_the_optimum(
    num_units: int, num_channels: int, drift: str, fading: str, streamed: bool
) -> None:
    found = 0
    for seed in range(5):
        options = {"drift": drift, "fading": fading, "drift_weight": 10.0 ** (seed - 2)}
        problem = round_problem(seed, num_units, num_channels, streamed, **options)
        solution = solved(problem)
        if solution is None:
            with pytest.raises(InfeasibleRoundError):
                exact_allocation(problem)
            continue
        found += 1
        least = exact_allocation(problem).certificate.objective
        assert solution.certificate.objective >= least * (1 - 1e-9)
    assert found >= 2


def test_one_unit_and_one_channel_are_solved_optimally() -> None:
    """Decoupling then loses nothing, and eq. 35 is the objective up to constants."""
    for seed, drift, fading in itertools.product(
        range(4), ("gamma", "paper"), ("none", "rayleigh")
    ):
        problem = round_problem(seed, 1, 1, drift=drift, fading=fading)
        problem = replace(problem, fronts=(problem.fronts[0][-1:],))
        solution = solved(problem)
        if solution is not None:
            least = exact_allocation(problem).certificate.objective
            assert solution.certificate.objective == pytest.approx(least, rel=1e-7)


def test_power_is_within_its_limits() -> None:
    limited = 0
    for seed in range(6):
        problem = round_problem(seed, 4, 3, drift="gamma")
        solution = solved(problem)
        for each in solution.allocations if solution else ():
            uplink, channel = problem.uplinks[each.unit], problem.channels[each.channel]
            noise = channel.interference_w + channel.bandwidth_hz * channel.noise_w_per_hz
            snr = each.power_w * uplink.gains[each.channel] / noise
            joules = each.power_w * uplink.model_bits / (channel.bandwidth_hz * math.log2(1 + snr))
            assert 0 < each.power_w <= uplink.max_power_w
            assert joules <= uplink.energy_j * (1 + 1e-9)
            limited += each.power_w < uplink.max_power_w
    assert limited


def test_a_hard_gamma_excludes_some_of_the_fastest_points() -> None:
    """With S = 4, Γ is 0.23 plus the interference error, so the limit forbids the fastest
    points."""
    smaller = 0
    for seed in range(8):
        problem = round_problem(seed, 4, 3, drift="gamma", hard_gamma=True, gamma_max=0.36)
        solution = solved(problem)
        for each in solution.allocations if solution else ():
            smaller += each.partition != problem.fronts[each.unit][-1]
    assert smaller


def test_without_a_hard_gamma_units_take_their_fastest_points() -> None:
    problem = round_problem(1, 4, 3)
    solution = solved(problem)
    assert solution is not None
    for each in solution.allocations:
        assert each.partition == problem.fronts[each.unit][-1]


def test_the_matching_is_as_good_as_by_enumeration() -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        shape = tuple(rng.integers(1, 5, 2))
        ties = seed % 2
        uploads = rng.integers(1, 5, shape).astype(float) if ties else rng.uniform(1, 9, shape)
        uploads[rng.random(shape) < 0.3] = np.inf
        drift, weight = rng.uniform(-3, 3, shape), float(rng.choice([0.0, 0.1, 1.0, 10.0]))
        largest, least = by_enumeration(uploads, drift, weight)
        matching = match_channels(uploads, drift, weight)
        assert len(matching) == largest
        if largest:
            pairs = list(zip(matching.units, matching.channels, strict=True))
            assert len({unit for unit, _ in pairs}) == len({j for _, j in pairs}) == largest
            assert auxiliary(pairs, uploads, drift, weight) == pytest.approx(least, rel=1e-12)


def by_enumeration(uploads: Floats, drift: Floats, weight: float) -> tuple[int, float]:
    """Return the size of the largest matchings, and the least Υ among them."""
    units, channels = uploads.shape
    chosen = [
        list(zip(some, order, strict=True))
        for size in range(min(units, channels) + 1)
        for some in itertools.combinations(range(units), size)
        for order in itertools.permutations(range(channels), size)
    ]
    possible = [pairs for pairs in chosen if all(math.isfinite(uploads[pair]) for pair in pairs)]
    largest = max(map(len, possible))
    whole = [pairs for pairs in possible if len(pairs) == largest and pairs]
    costs = (auxiliary(pairs, uploads, drift, weight) for pairs in whole)
    return largest, min(costs, default=math.inf)


def auxiliary(pairs: list[Any], uploads: Floats, drift: Floats, weight: float) -> float:
    return weight * max(uploads[pair] for pair in pairs) + sum(drift[pair] for pair in pairs)


def senders(seed: int, count: int, fading: str, drift: str) -> Senders:
    rng = np.random.default_rng(seed)
    interference, high = rng.uniform(0.001, 0.1, count), rng.uniform(0.05, 1, count)
    prices = 10 ** rng.uniform(-2, 2, count)
    gains, bandwidth_hz = rng.uniform(0.01, 1, count), rng.uniform(0.1, 1, count) * 1e6
    ratios, bits = gains / (interference * (1 + 1e-9)), 10 ** rng.uniform(6, 8, count)
    figures = (gains, bandwidth_hz, interference, ratios, high, 0 * high, bits, bits, bits)
    return Senders(
        Links(*figures, fading=fading),
        low_w=high * float(rng.choice([0.0, 0.2])),
        high_w=high,
        watt_price=prices * (drift == "paper"),
        error_price=prices * (drift == "gamma"),
        drift_weight=10 ** rng.uniform(-2, 1),
    )


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
@pytest.mark.parametrize("count", [1, 2])
def test_power_is_as_good_as_a_fine_grid(count: int, drift: str, fading: str) -> None:
    for seed in range(cases(3, 6)):
        problem = senders(seed, count, fading, drift)
        power = controlled_power(problem, problem.high_w)
        assert (power >= problem.low_w).all()
        assert (power <= problem.high_w).all()
        assert problem.cost(power) <= least_on_a_grid(problem) * (1 + 1e-7)


def least_on_a_grid(problem: Senders) -> float:
    """Return the least Υ over 1,000 powers of the first unit, and 1,000 of the second, if any."""
    shares = np.linspace(0, 1, 1001)[1:, None]
    grid = problem.low_w + shares * (problem.high_w - problem.low_w)
    uploads = problem.links.uploads(grid).T
    drifts = (problem.watt_price * grid + problem.error_price * problem.errors(grid)).T
    if len(uploads) == 1:
        return float((problem.drift_weight * uploads[0] + drifts[0]).min())
    longest = np.maximum.outer(uploads[0], uploads[1])
    return float((problem.drift_weight * longest + np.add.outer(drifts[0], drifts[1])).min())


@pytest.mark.parametrize("fading", ["none", "rayleigh"])
@pytest.mark.parametrize("drift", ["gamma", "paper"])
def test_power_does_not_depend_on_the_start(drift: str, fading: str) -> None:
    for seed in range(cases(3, 6)):
        problem = senders(seed, 3, fading, drift)
        low = np.maximum(problem.low_w, 0.01 * problem.high_w)
        costs = [problem.cost(controlled_power(problem, start)) for start in (problem.high_w, low)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-5)


def test_power_is_within_its_limits_for_extreme_inputs() -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        base = senders(seed, 3, "none", "paper")
        gains, noise_w = (10 ** rng.uniform(-12, 0, 3) for _ in range(2))
        problem = replace(
            base,
            links=replace(base.links, gains=gains, snr_per_watt=gains / noise_w),
            watt_price=10 ** rng.uniform(-3, 6, 3),
        )
        power = controlled_power(problem, problem.high_w)
        assert (power >= problem.low_w).all()
        assert (power <= problem.high_w).all()
        assert problem.cost(power) <= problem.cost(problem.high_w)


def test_rounds_without_energy_or_fronts_are_refused() -> None:
    problem = round_problem(0, 3, 2)
    poor = tuple(replace(uplink, energy_j=1e-3) for uplink in problem.uplinks)
    with pytest.raises(InfeasibleRoundError, match="energy_j"):
        paper_allocation(replace(problem, uplinks=poor))
    with pytest.raises(InfeasibleRoundError, match="blocks"):
        paper_allocation(replace(problem, fronts=((), (), ())))
