"""Rates, energies, Γ and drift of units on channels, implemented apart from the solvers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collapipe.state import Payload
from optim.problem import Bools, Floats, Ints, Partition
from optim.round.problem import RoundOptions, RoundProblem

# Nodes t = e^s of the trapezoidal rule. It computes ∫ e^{-t} ρ/(1 + ρt) dt within 1e-14 for mean
# signal-to-noise ratios ρ from 1e-8 to 1e10.
_STEP = 0.25
_NODES = np.exp(np.arange(-52.0, 4.0, _STEP))
_WEIGHTS = _STEP * _NODES * np.exp(-_NODES)


@dataclass(frozen=True, slots=True)
class UplinkPairs:
    """Units and channels in pairs: arrays of one shape, SI units."""

    max_power_w: Floats
    energy_j: Floats
    model_bits: Floats
    bits: Floats  # uploaded bits, θ^enc + z^enc
    paid_bits: Floats  # bits that the energy must cover: all, or θ^enc
    gain: Floats
    bandwidth_hz: Floats
    interference_w: Floats
    snr_per_w: Floats  # h/(I + B·N_0)
    gradient_error: Floats  # ρ of the unit's payload


def pairs_of(
    problem: RoundProblem, units: Ints, channels: Ints, payloads: Sequence[Payload | None] = ()
) -> UplinkPairs:
    """Return the pairs of ``units`` and ``channels``, two arrays of one shape.

    ``payloads`` are the payloads of the problem's N units; None, or no list, means the unit's only
    payload.
    """
    sent = payloads or (None,) * len(problem.uplinks)
    uplinks = [up.sending(each) for up, each in zip(problem.uplinks, sent, strict=True)]
    max_power, energy, model_bits, activation_bits = np.array(
        [(up.max_power_w, up.energy_j, up.model_bits, up.activation_bits) for up in uplinks]
    ).T[:, units]
    rho = np.array([each.gradient_error if each else 0.0 for each in sent])[units]
    bandwidth, interference, density = np.array(
        [(band.bandwidth_hz, band.interference_w, band.noise_w_per_hz) for band in problem.channels]
    ).T[:, channels]
    gain = np.array([uplink.gains for uplink in problem.uplinks])[units, channels]
    snr_per_w, bits = per(gain, interference + bandwidth * density), model_bits + activation_bits
    paid = model_bits if problem.options.energy == "adapters" else bits
    return UplinkPairs(
        max_power, energy, model_bits, bits, paid, gain, bandwidth, interference, snr_per_w, rho
    )


def all_pairs(problem: RoundProblem) -> Iterator[UplinkPairs]:
    """Yield all pairs of units and channels, [N, J], once for each allowed payload.

    A unit with fewer payloads than others repeats its last one.
    """
    units, channels = np.indices((len(problem.uplinks), len(problem.channels)))
    allowed = [allowed_payloads(problem, unit) for unit in range(len(problem.uplinks))]
    for place in range(max(map(len, allowed), default=0)):
        sent = [each[min(place, len(each) - 1)] for each in allowed]
        yield pairs_of(problem, units, channels, sent)


def allowed_payloads(problem: RoundProblem, unit: int) -> Sequence[Payload | None]:
    """Return the unit's allowed payloads: without error queues, those with ρ within the budget."""
    most = math.inf if problem.error_queues else problem.options.error_budget
    offered = problem.uplinks[unit].payloads
    return [each for each in offered if each.gradient_error <= most] or [None]


def per(amount: Floats, rate: Floats) -> Floats:
    """Return amount / rate: 0 for amount 0, and infinity for another amount at rate 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(amount, 0), 0.0, amount / rate)


def rates(pairs: UplinkPairs, power_w: Floats, options: RoundOptions) -> Floats:
    """Return the rate of eq. 10, bit/s: B·E log2(1 + ρg) with g = 1, or with fading g exponential
    of mean 1.

    With fading E ln(1 + ρg) = ∫ e^{-t} ρ/(1 + ρt) dt over t > 0, by parts.
    """
    snr = pairs.snr_per_w * power_w
    if options.fading == "none":
        nats = np.log1p(snr)
    else:
        nats = np.sum(_WEIGHTS * snr[..., None] / (1 + snr[..., None] * _NODES), axis=-1)
    return pairs.bandwidth_hz * nats / math.log(2)


def uploads(pairs: UplinkPairs, power_w: Floats, options: RoundOptions) -> Floats:
    """Return the upload times of eq. 11, seconds."""
    return per(pairs.bits, rates(pairs, power_w, options))


def finishes(
    latency_s: Floats,
    slowest_s: Floats,
    m: Ints,
    pairs: UplinkPairs,
    power_w: Floats,
    options: RoundOptions,
) -> Floats:
    """Return the seconds until everything is computed and sent.

    If uploads are streamed, the uplink is a stage of the pipeline. The last micro-batch leaves the
    pipeline m - 1 times the slowest stage after the first one.
    """
    rate = rates(pairs, power_w, options)
    activations, model = per(pairs.bits - pairs.model_bits, rate), per(pairs.model_bits, rate)
    if options.uplink == "after":
        return latency_s + activations + model
    first = latency_s - (m - 1) * slowest_s + activations / m
    return first + (m - 1) * np.maximum(slowest_s, activations / m) + model


def energies(pairs: UplinkPairs, power_w: Floats, options: RoundOptions) -> Floats:
    """Return the energy of eq. 12, joules; at power 0 its limit, bits·ln 2/(B·snr_per_w)."""
    vanishing = per(pairs.paid_bits * math.log(2), pairs.bandwidth_hz * pairs.snr_per_w)
    sending = per(power_w * pairs.paid_bits, rates(pairs, power_w, options))
    return np.where(power_w > 0, sending, vanishing)


def gammas(pairs: UplinkPairs, power_w: Floats, segments: Ints, problem: RoundProblem) -> Floats:
    """Return Γ of scheduled units (eq. 28)."""
    options = problem.options
    corruption = per(
        np.array(options.interference_constant_w), power_w * pairs.gain + pairs.interference_w
    )
    spread = options.gradient_bound * _charged(segments, problem) ** 2 / problem.num_blocks
    noise = options.gradient_bound * (1 + pairs.gradient_error)
    return options.kappa * (spread + corruption + noise)


def idle_gamma(problem: RoundProblem) -> float:
    """Return Γ (eq. 28) with S = 0, p = 0 and the channels' mean interference."""
    options = problem.options
    mean = np.mean([channel.interference_w for channel in problem.channels])
    corruption = per(np.array(options.interference_constant_w), np.array(mean))
    return options.kappa * (float(corruption) + options.gradient_bound)


def penalties(
    units: Ints, pairs: UplinkPairs, power_w: Floats, segments: Ints, problem: RoundProblem
) -> Floats:
    """Return the drift of scheduled units: Y·Γ, or Y·(S + p) under ``paper`` (eq. 32), plus half of
    the increase of Q(t+1)² by ρ.
    """
    queues, of_errors = np.array(problem.queues)[units], 0.0
    if problem.error_queues:
        before = np.array(problem.error_queues)[units] - 1
        after = before + pairs.gradient_error / problem.options.error_budget
        of_errors = (np.maximum(after, 0) ** 2 - np.maximum(before, 0) ** 2) / 2
    if problem.options.drift == "gamma":
        return queues * gammas(pairs, power_w, segments, problem) + of_errors
    return queues * (segments + power_w) + of_errors


def idle_penalties(problem: RoundProblem) -> Floats:
    """Return the drift of each unit without a channel, [N]."""
    queues = np.array(problem.queues, dtype=float)
    return queues * (idle_gamma(problem) if problem.options.drift == "gamma" else 0.0)


def reached(pairs: UplinkPairs) -> Bools:
    """Return the pairs with a positive rate at some power (C6). No other pair may be used, even if
    the unit has nothing to send."""
    usable: Bools = (pairs.max_power_w > 0) & (pairs.snr_per_w > 0)
    return usable


def feasible(problem: RoundProblem, ease: float) -> Bools:
    """Return the pairs that are feasible at some power with some payload (C6, C8, C11), [N, J].

    Limits are multiplied by ``ease``. The energy per bit grows with the power, so only the least
    power that satisfies C11 is checked.
    """
    found = [_feasible(pairs, problem, ease) for pairs in all_pairs(problem)]
    return np.asarray(np.any(found, axis=0))


def _feasible(pairs: UplinkPairs, problem: RoundProblem, ease: float) -> Bools:
    held = np.array([bool(front) for front in problem.fronts])[:, None]
    usable: Bools = held & reached(pairs)
    needed = np.zeros_like(pairs.gain)
    if problem.options.hard_gamma:
        needed = _least_power(pairs, problem, ease)
    spent = energies(pairs, np.minimum(needed, pairs.max_power_w), problem.options)
    enough: Bools = (spent < pairs.energy_j * ease) | (pairs.paid_bits == 0)
    return usable & enough & (needed <= pairs.max_power_w * ease)


def _least_power(pairs: UplinkPairs, problem: RoundProblem, ease: float) -> Floats:
    """Return the least power, W, with Γ ≤ Γ^max at the front's smallest S; infinite if none."""
    options = problem.options
    fewest = _charged(np.array([_fewest(front) for front in problem.fronts]), problem)
    noise = 1 + pairs.gradient_error
    spread = (
        options.kappa * options.gradient_bound * (fewest[:, None] ** 2 / problem.num_blocks + noise)
    )
    left = np.maximum(options.gamma_max * ease - spread, 0.0)
    signal = per(np.array(options.kappa * options.interference_constant_w), left)
    power = np.maximum(per(signal - pairs.interference_w, pairs.gain), 0.0)
    return np.where(options.gamma_max * ease < spread, math.inf, power)


def _charged(segments: Ints, problem: RoundProblem) -> Ints:
    """Return the S that have a price in Γ: 0 if segments have none."""
    return segments if problem.options.segment_price == "paper" else np.zeros_like(segments)


def _fewest(front: Sequence[Partition]) -> int:
    """Return an S that the front has for every place of the head: the largest of the places'
    smallest S; 0 for an empty front."""
    heads = {point.head for point in front}
    with_each = [[p.num_segments for p in front if p.head == head] for head in heads]
    return max(map(min, with_each), default=0)
