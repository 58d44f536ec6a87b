"""Small random rounds with many special cases, and their optimum by enumeration.

The enumeration shares no code with the solvers: it uses scalars, root finding and all matchings.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar

from collapipe.state import Channel, Uplink
from optim.problem import Partition
from optim.round.problem import RoundOptions, RoundProblem


def random_round(
    rng: np.random.Generator,
    drift: str,
    fading: str = "none",
    most_units: int = 5,
    most_channels: int = 4,
    most_segments: int = 4,
    most_points: int = 2,
) -> RoundProblem:
    """Draw a round; some have empty fronts, pairs without energy, queues of 0, or equal costs.

    Uploads run during the pipelines or after them, and some take longer than the pipelines.
    """
    num_units = int(rng.integers(1, most_units + 1))
    num_channels = int(rng.integers(1, most_channels + 1))
    hard = bool(rng.random() < 0.25)
    gamma = float(rng.uniform(0.3, 0.9)) if hard else 0.84
    options = RoundOptions(
        drift=drift,
        drift_weight=float(10 ** rng.uniform(-3, 1)),
        interference_constant_w=0.0 if rng.random() < 0.1 else 0.08,
        gamma_max=gamma,
        hard_gamma=hard,
        fading=fading,
        uplink="streamed" if rng.random() < 0.7 else "after",
        energy="all" if rng.random() < 0.5 else "adapters",
        segment_price="paper",
    )
    channels = tuple(
        Channel(float(rng.uniform(4e5, 6e5)), float(rng.uniform(0.06, 0.08)), 4e-21)
        for _ in range(num_channels)
    )
    return RoundProblem(
        fronts=tuple(_front(rng, most_segments, most_points) for _ in range(num_units)),
        uplinks=tuple(_uplink(rng, channels, options.energy) for _ in range(num_units)),
        channels=channels,
        queues=_queues(rng, num_units),
        num_blocks=12,
        options=options,
    )


def _front(rng: np.random.Generator, most_segments: int, most_points: int) -> tuple[Partition, ...]:
    """Draw up to ``most_points`` points for each of several S; more segments are seldom slower."""
    if rng.random() < 0.15:
        return ()
    count = int(rng.integers(1, most_segments + 1))
    held = sorted((1 + rng.choice(4, size=count, replace=False)).tolist())
    latencies = [float(x) for x in 20 + rng.choice(60, count, replace=False)]
    if rng.random() < 0.7:
        latencies = [float(x * rng.uniform(0.99, 1.0)) for x in latencies]
    points = []
    for segments, latency in zip(held, sorted(latencies, reverse=True), strict=True):
        for _ in range(int(rng.integers(1, most_points + 1))):
            points.append(point_of(rng, segments, latency))
            latency *= float(rng.choice([1.0, rng.uniform(1.0, 1.2)]))
    return tuple(points)


def point_of(rng: np.random.Generator, segments: int, latency_s: float) -> Partition:
    """Draw a point whose slowest stage takes at least an eighth of the sum of all stages."""
    m, share = int(rng.choice([1, 2, 4, 8])), float(rng.choice([0.125, rng.uniform(0.125, 1.0)]))
    slowest = latency_s / (1 / share + m - 1)
    return Partition((13 - segments,) + (1,) * (segments - 1), m, latency_s, slowest)


def _uplink(rng: np.random.Generator, channels: tuple[Channel, ...], energy_for: str) -> Uplink:
    gains = tuple(float(10 ** rng.uniform(-1.5, 0)) for _ in channels)
    if rng.random() < 0.2:
        gains = (gains[0],) * len(gains)
    if rng.random() < 0.1:
        gains = (0.0, *gains[1:])
    bits = float(rng.uniform(1e6, 1e7))
    activations = float(rng.choice([0.0, 1e7, 10 ** rng.uniform(6.5, 8.0)]))
    paid = bits + activations if energy_for == "all" else bits
    # Between too little energy for every channel and more than enough.
    energy = paid * math.log(2) * 0.07 / 5e5 * float(10 ** rng.uniform(-0.2, 1.8))
    return Uplink(float(rng.uniform(0.1, 3.0)), energy, bits, activations, gains)


def _queues(rng: np.random.Generator, num_units: int) -> tuple[float, ...]:
    kind = rng.random()
    if kind < 0.15:
        return (0.0,) * num_units
    if kind < 0.3:
        return (3.0,) * num_units
    queues = rng.uniform(0, 20, num_units) * (rng.random(num_units) < 0.8)
    return tuple(float(queue) for queue in queues)


def rate(problem: RoundProblem, unit: int, channel: int, power: float) -> float:
    """Return the bit/s by definition; the mean over fading is computed by quadrature."""
    band = problem.channels[channel]
    noise = band.interference_w + band.bandwidth_hz * band.noise_w_per_hz
    snr = power * problem.uplinks[unit].gains[channel] / noise
    if problem.options.fading == "none":
        return band.bandwidth_hz * math.log1p(snr) / math.log(2)
    mean, _ = quad(lambda x: math.exp(-x) * math.log1p(snr * x), 0, 60, epsrel=1e-12, limit=200)
    return band.bandwidth_hz * mean / math.log(2)


def finish(problem: RoundProblem, unit: int, point: Partition, rate_bps: float) -> float:
    """Return the time at which all data is sent, in order, as micro-batches leave the pipeline."""
    uplink, m, sent_s = problem.uplinks[unit], point.num_micro_batches, 0.0
    for left_s in leaves(problem, point):
        sent_s = max(sent_s, left_s) + uplink.activation_bits / m / rate_bps
    return sent_s + uplink.model_bits / rate_bps


def leaves(problem: RoundProblem, point: Partition) -> list[float]:
    """Return the time at which each micro-batch may be uploaded."""
    m, pace = point.num_micro_batches, point.slowest_s
    if problem.options.uplink == "after":
        pace = 0.0
    return [point.latency_s - later * pace for later in range(m - 1, -1, -1)]


def least_rate(problem: RoundProblem, unit: int, point: Partition, deadline_s: float) -> float:
    """Return the least bit/s that keeps a deadline.

    The data of a micro-batch and all later data must be sent after it leaves the pipeline.
    """
    uplink, m = problem.uplinks[unit], point.num_micro_batches
    return max(
        ((m - place) / m * uplink.activation_bits + uplink.model_bits) / (deadline_s - left_s)
        for place, left_s in enumerate(leaves(problem, point))
    )


def paid_bits(problem: RoundProblem, unit: int) -> float:
    """Return the bits whose upload is paid from the unit's energy."""
    uplink = problem.uplinks[unit]
    if problem.options.energy == "adapters":
        return uplink.model_bits
    return uplink.model_bits + uplink.activation_bits


def highest_power(problem: RoundProblem, unit: int, channel: int) -> float:
    """Return P^max, or the power that uses up the energy; 0 if no power is affordable."""
    uplink, band, bits = problem.uplinks[unit], problem.channels[channel], paid_bits(problem, unit)
    gain = uplink.gains[channel]
    noise = band.interference_w + band.bandwidth_hz * band.noise_w_per_hz
    least = bits * math.log(2) * noise / band.bandwidth_hz
    if not gain or least / gain >= uplink.energy_j:
        return 0.0

    def left(power: float) -> float:
        return uplink.energy_j * rate(problem, unit, channel, power) - power * bits

    if left(uplink.max_power_w) >= 0:
        return uplink.max_power_w
    low = uplink.max_power_w
    while left(low) < 0:
        low /= 2
    return float(brentq(left, low, 2 * low, xtol=1e-15))


@dataclass(frozen=True)
class Option:
    """A front's point on a channel, with the largest power and the least power that C11 allows.

    ``finish_s`` is the finish time at the largest power.
    """

    partition: Partition
    limit_w: float
    floor_w: float
    finish_s: float


def pair_options(problem: RoundProblem, unit: int, channel: int) -> list[Option]:
    """Return the feasible options of a unit on a channel."""
    options = problem.options
    limit = highest_power(problem, unit, channel)
    allowed = problem.error_queues or gradient_error(problem, unit) <= options.error_budget
    if not (limit and allowed):
        return []
    most_bps, found = rate(problem, unit, channel, limit), []
    for point in problem.fronts[unit]:
        floor = 0.0
        if options.hard_gamma:
            if gamma(problem, unit, channel, point, limit) > options.gamma_max:
                continue
            if gamma(problem, unit, channel, point, 0.0) > options.gamma_max:

                def excess(power: float, point: Partition = point) -> float:
                    return gamma(problem, unit, channel, point, power) - options.gamma_max

                floor = float(brentq(excess, 0.0, limit, xtol=1e-15))
        found.append(Option(point, limit, floor, finish(problem, unit, point, most_bps)))
    return found


def gamma(problem: RoundProblem, unit: int, channel: int, point: Partition, power: float) -> float:
    """Return Γ by definition."""
    options = problem.options
    received = power * problem.uplinks[unit].gains[channel]
    error = options.interference_constant_w / (received + problem.channels[channel].interference_w)
    priced = point.num_segments if options.segment_price == "paper" else 0
    split = options.gradient_bound * priced**2 / problem.num_blocks
    noise = options.gradient_bound * (1 + gradient_error(problem, unit))
    return options.kappa * (split + error + noise)


def gradient_error(problem: RoundProblem, unit: int) -> float:
    """Return ρ of the unit's first payload; 0 without payloads."""
    payloads = problem.uplinks[unit].payloads
    return payloads[0].gradient_error if payloads else 0.0


def error_drift(problem: RoundProblem, units: Iterable[int]) -> float:
    """Return half of what these units' errors add to the squares of their error queues."""
    total = 0.0
    for unit in units if problem.error_queues else ():
        queue, budget = problem.error_queues[unit], problem.options.error_budget
        without_error, with_error = (
            max(queue + error / budget - 1, 0) for error in (0, gradient_error(problem, unit))
        )
        total += (with_error**2 - without_error**2) / 2
    return total


def best_of_payloads(problem: RoundProblem) -> tuple[int, float]:
    """Return the optimum over all choices of one payload for each unit.

    For each choice, ``best_by_enumeration`` solves the round with these payloads and the points
    whose head is in the same place.
    """
    offered = (uplink.payloads for uplink in problem.uplinks)
    found = []
    for sent in itertools.product(*offered):
        pairs = zip(problem.uplinks, sent, strict=True)
        fixed = tuple(replace(up.sending(each), payloads=(each,)) for up, each in pairs)
        fronts = tuple(
            tuple(point for point in front if point.head == each.head)
            for front, each in zip(problem.fronts, sent, strict=True)
        )
        found.append(best_by_enumeration(replace(problem, uplinks=fixed, fronts=fronts)))
    most = max(number for number, _ in found)
    return most, min(least for number, least in found if number == most)


def idle(problem: RoundProblem) -> float:
    """Return Γ of a unit without a channel."""
    options = problem.options
    mean = sum(band.interference_w for band in problem.channels) / len(problem.channels)
    error = options.interference_constant_w / mean
    return options.kappa * (error + options.gradient_bound)


def matchings(pairs: set[tuple[int, int]], units: int) -> Iterator[dict[int, int]]:
    """Yield every matching of the pairs as unit → channel, including the empty one."""

    def extend(unit: int, taken: dict[int, int]) -> Iterator[dict[int, int]]:
        if unit == units:
            yield taken
            return
        yield from extend(unit + 1, taken)
        for n, j in pairs:
            if n == unit and j not in taken.values():
                yield from extend(unit + 1, {**taken, unit: j})

    return extend(0, {})


def best_by_enumeration(problem: RoundProblem) -> tuple[int, float]:
    """Return ν, the largest number of units, and the least objective of all rounds with ν units."""
    places = itertools.product(range(len(problem.uplinks)), range(len(problem.channels)))
    options = {pair: found for pair in places if (found := pair_options(problem, *pair))}
    every = list(matchings(set(options), len(problem.uplinks)))
    most = max(map(len, every))
    if not most:
        return 0, math.inf
    least = least_gamma if problem.options.drift == "gamma" else least_paper
    largest = (matching for matching in every if len(matching) == most)
    return most, min(least(problem, matching, options) for matching in largest)


Table = dict[tuple[int, int], list[Option]]


def least_gamma(problem: RoundProblem, matching: dict[int, int], table: Table) -> float:
    """Return the least objective of a matching over all points of the fronts."""
    finish, costs = [], []
    for unit, channel in matching.items():
        options, queue = table[unit, channel], problem.queues[unit]
        finish.append(np.array([option.finish_s for option in options]))
        costs.append(
            np.array(
                [
                    queue * gamma(problem, unit, channel, each.partition, each.limit_w)
                    for each in options
                ]
            )
        )
    idle_units = set(range(len(problem.uplinks))) - set(matching)
    drift = sum(problem.queues[unit] for unit in idle_units) * idle(problem)
    drift += error_drift(problem, matching)
    makespans = functools.reduce(np.maximum.outer, finish)
    drifts = functools.reduce(np.add.outer, costs)
    return float((problem.options.drift_weight * makespans + drifts).min()) + drift


def least_paper(problem: RoundProblem, matching: dict[int, int], table: Table) -> float:
    """Return the least objective of a matching over all points of the fronts, by line searches."""
    pairs, least = list(matching.items()), math.inf
    weight = problem.options.drift_weight
    rounds = [
        _FixedRound(problem, pairs, each)
        for each in itertools.product(*(table[pair] for pair in pairs))
    ]
    for fixed in sorted(rounds, key=lambda each: each.bound):
        if fixed.bound >= least:
            break
        # No later deadline is better, and the drift is the least at this one.
        last = fixed.first_s + (least - fixed.bound) / weight
        if math.isinf(last) or weight * fixed.first_s + fixed.drift(last) < least:
            least = min(least, _valley(fixed))
    return least


@dataclass(frozen=True)
class _FixedRound:
    """A matching with one point of the front for each pair."""

    problem: RoundProblem
    pairs: list[tuple[int, int]]
    chosen: tuple[Option, ...]

    @functools.cached_property
    def first_s(self) -> float:
        """The earliest deadline that all units can keep."""
        return max(option.finish_s for option in self.chosen)

    @functools.cached_property
    def bound(self) -> float:
        """A lower bound of the objective: the earliest deadline, and the least powers that C11
        allows."""
        drift = error_drift(self.problem, (unit for unit, _ in self.pairs))
        drift += sum(
            self.problem.queues[unit] * (option.partition.num_segments + option.floor_w)
            for (unit, _), option in zip(self.pairs, self.chosen, strict=True)
        )
        return self.problem.options.drift_weight * self.first_s + drift

    def drift(self, deadline: float) -> float:
        """Return the drift for the least powers that keep the deadline."""
        total = error_drift(self.problem, (unit for unit, _ in self.pairs))
        for (unit, channel), option in zip(self.pairs, self.chosen, strict=True):
            needed_bps = least_rate(self.problem, unit, option.partition, deadline)
            power = least_power(self.problem, unit, channel, needed_bps)
            power = min(max(power, option.floor_w), option.limit_w)
            total += self.problem.queues[unit] * (option.partition.num_segments + power)
        return total


def _valley(fixed: _FixedRound) -> float:
    weight, first = fixed.problem.options.drift_weight, fixed.first_s

    def value(deadline: float) -> float:
        return weight * deadline + fixed.drift(deadline)

    last = first + fixed.drift(first) / weight
    rough = minimize_scalar(value, bounds=(first, last), method="bounded")
    # Its error is 1e-8 of the deadline, which matters if the value has a kink.
    low, high = max(first, float(rough.x) * (1 - 1e-6)), float(rough.x) * (1 + 1e-6)
    for _ in range(60):
        third = (high - low) / 3
        low, high = (
            (low, high - third) if value(low + third) < value(high - third) else (low + third, high)
        )
    return min(value(first), value(low))


def least_power(problem: RoundProblem, unit: int, channel: int, rate_bps: float) -> float:
    """Return the least power that reaches this rate."""
    band, gain = problem.channels[channel], problem.uplinks[unit].gains[channel]
    noise = band.interference_w + band.bandwidth_hz * band.noise_w_per_hz
    steady = math.expm1(rate_bps / band.bandwidth_hz * math.log(2)) * noise / gain
    if problem.options.fading == "none":
        return steady

    def excess(power: float) -> float:
        return rate(problem, unit, channel, power) - rate_bps

    # Fading lowers the mean rate, so that more power than ``steady`` is needed.
    high = 2 * steady
    while excess(high) < 0:
        high *= 2
    return float(brentq(excess, steady, high, xtol=1e-15))
