"""The uplink: rates, upload times, energy, and the limits of a unit's power."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from scipy.special import exp1, lambertw

from collapipe.state import Channel, Uplink
from optim.problem import Floats, Ints

# A pair is infeasible if its budget over the cost at vanishing power is below this.
_FEASIBLE_FROM = 1.0 + 1e-9
# For smaller budgets the Lambert form loses digits.
_LAMBERT_FROM = 1.1
_SERIES_TERMS = 12
# Newton steps until the last digit is exact; with fading the start is less precise.
_NEWTON_STEPS = 4
_FADING_STEPS = 8
# Newton steps for ``required_snr`` with fading: two leave an error of 1e-7, three of 1e-14.
_RATIO_STEPS = 3
# From this 1/ρ on, ten terms of the continued fraction of the mean over a fading gain are exact to
# the last digit. The direct form loses digits there, and overflows above 700.
_FRACTION_FROM = 20.0
_FRACTION_TERMS = 10


@dataclass(frozen=True, slots=True)
class Links:
    """Pairs of a unit n and a channel j: arrays [N, J] of all pairs, or [A] of selected pairs.

    With several payloads q per unit the arrays are [Q, N, J].
    """

    gains: Floats  # h
    bandwidth_hz: Floats  # B
    interference_w: Floats  # I
    snr_per_watt: Floats  # a = h/(I + B·N_0); its mean with fading
    max_power_w: Floats  # P^max
    energy_j: Floats  # E^max
    model_bits: Floats  # θ
    upload_bits: Floats  # z + θ
    paid_bits: Floats  # bits that E^max must cover: all, or θ as printed in C8
    fading: str = field(kw_only=True)  # see ``RoundOptions``

    def at(self, *places: Ints | int | slice | None) -> "Links":
        """Pick the pairs at these places of the arrays, [A] each."""
        *arrays, fading = (getattr(self, each.name) for each in fields(self))
        return Links(*(each[places] for each in arrays), fading=fading)

    def rates(self, power_w: Floats) -> Floats:
        """Bit/s of eq. (10), broadcast: B·log2(1 + p·h/(I + B·N_0)) or its mean over the gain."""
        nats = nats_per_hz(power_w * self.snr_per_watt, self.fading)
        return self.bandwidth_hz * nats / math.log(2)

    def uploads(self, power_w: Floats) -> Floats:
        """Seconds of each upload (eq. 11), broadcast."""
        return upload_time(self.upload_bits, self.rates(power_w))

    def parts(self, power_w: Floats) -> tuple[Floats, Floats]:
        """Seconds of an upload's activations, and of its model, broadcast."""
        rates = self.rates(power_w)
        activations = upload_time(self.upload_bits - self.model_bits, rates)
        return activations, upload_time(self.model_bits, rates)

    def energies(self, power_w: Floats) -> Floats:
        """Joules that E^max must cover (eq. 12), broadcast."""
        return power_w * upload_time(self.paid_bits, self.rates(power_w))

    @property
    def budgets(self) -> Floats:
        """k = E·B·a/(bits·ln 2), [N, J]: the energy budget over the cost at vanishing power."""
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = self.energy_j * self.bandwidth_hz / (self.paid_bits * math.log(2))
            unlimited = (self.paid_bits == 0) | np.isinf(seconds)
            return np.where(unlimited, math.inf, seconds * self.snr_per_watt)


def links(
    uplinks: Sequence[Uplink], channels: Sequence[Channel], fading: str, energy: str
) -> Links:
    """Return the pairs of N units with J channels for each unit's q-th payload, [Q, N, J].

    ``fading`` and ``energy`` are as in ``RoundOptions``. Q is 1 if units have no choice of
    payloads. Pairs with a payload that the unit lacks have a maximum power of 0.
    """
    most = max((len(up.payloads) for up in uplinks), default=0) or 1
    bits = np.full((most, len(uplinks), 2), np.nan)  # of model and activations
    for unit, up in enumerate(uplinks):
        sent = [(each.model_bits, each.activation_bits) for each in up.payloads]
        bits[: len(sent) or 1, unit] = sent or (up.model_bits, up.activation_bits)
    units = np.array([(up.max_power_w, up.energy_j) for up in uplinks], dtype=np.float64)
    bands = np.array(
        [(each.bandwidth_hz, each.interference_w, each.noise_w_per_hz) for each in channels],
        dtype=np.float64,
    ).reshape(-1, 3)
    bandwidth, interference, density = bands.T
    max_power, budget = units.reshape(-1, 2).T[:, :, np.newaxis]
    lacking = np.isnan(bits).any(axis=2, keepdims=True)
    model_bits, activation_bits = np.where(lacking, 0.0, bits).transpose(2, 0, 1)[..., np.newaxis]
    max_power = np.where(lacking, 0.0, max_power)
    gains = np.array([up.gains for up in uplinks], dtype=np.float64)
    gains = gains.reshape(len(uplinks), len(channels))
    ratios, upload_bits = gains / (interference + bandwidth * density), model_bits + activation_bits
    paid_bits = upload_bits if energy == "all" else model_bits
    arrays = np.broadcast_arrays(
        *(gains, bandwidth, interference, ratios, max_power, budget, model_bits, upload_bits),
        paid_bits,
    )
    return Links(*arrays, fading=fading)


def upload_time(bits: Floats | float, rate_bps: Floats) -> Floats:
    """Return the seconds of eq. (11), broadcast; infinite at rate 0, and 0 without bits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(bits) > 0, bits / rate_bps, 0.0)


def nats_per_hz(snr: Floats, fading: str) -> Floats:
    """Return the nats per second and hertz at the (mean) signal-to-noise ratio ρ: ln(1 + ρ), or its
    mean."""
    return mean_nats_and_shortfall(snr)[0] if fading == "rayleigh" else np.log1p(snr)


def required_snr(nats: Floats, fading: str) -> tuple[Floats, Floats]:
    """Return the ratio ρ that gives ``nats`` > 0 per second and hertz, and dρ/dnats; both are
    convex."""
    if fading != "rayleigh":
        growth = np.expm1(nats)
        return growth, growth + 1.0
    # Start with ln(e^y - 1), the answer without fading, times a factor from 1 to e^0.577 = 1.78.
    log_snr = nats + np.log(-np.expm1(-nats)) + np.log1p(0.78 * nats / (1.0 + nats))
    shortfall = log_snr
    for _ in range(_RATIO_STEPS):
        carried, shortfall = mean_nats_and_shortfall(np.exp(log_snr))
        log_snr = log_snr - (carried - nats) / shortfall
    snr = np.exp(log_snr)
    return snr, snr / shortfall


def mean_nats_and_shortfall(snr: Floats) -> tuple[Floats, Floats]:
    """Return g = E ln(1 + ρX) = e^x·E₁(x), in nats, and 1 - g/ρ = e^x·E₂(x), for Rayleigh fading.

    The gain X is exponentially distributed with mean 1; ``snr`` is the mean ratio ρ = 1/x ≥ 0, of
    any shape. The second result, the shortfall, is computed without cancellation, and equals
    dg/d ln ρ.
    """
    with np.errstate(divide="ignore"):
        x = 1.0 / np.asarray(snr, dtype=np.float64)
    weak = x >= _FRACTION_FROM
    direct = np.where(weak, 1.0, x)
    nats = np.exp(direct) * exp1(direct)
    shortfall = np.where(weak, _fraction(np.where(weak, x, 1.0)), 1.0 - direct * nats)
    return np.where(weak, snr * (1.0 - shortfall), nats), shortfall


def _fraction(x: Floats) -> Floats:
    """Return e^x·E₂(x) for large x: 1/(x+2 - 2/(x+4 - 6/(x+6 - …)))."""
    tail = np.zeros_like(x)
    for term in range(_FRACTION_TERMS, 0, -1):
        tail = term * (term + 1) / (x + 2 * (term + 1) - tail)
    return 1.0 / (x + 2.0 - tail)


def power_limits(pairs: Links) -> Floats:
    """Return p̄, the smaller of P^max and the largest power that E^max allows (C8), [N, J] in W.

    p̄ is 0 if a pair is infeasible at any power, because a bit costs at least
    ln 2·(I + B·N_0)/(h·B) joule; with fading h is the mean gain.
    """
    slope, budget = pairs.snr_per_watt, pairs.budgets
    ceiling = slope * pairs.max_power_w
    feasible = (budget > _FEASIBLE_FROM) & (ceiling > 0)
    with np.errstate(invalid="ignore"):
        # If c·ln(1 + a·p) ≥ p at P^max, it also holds for smaller p, and no root is needed.
        free = feasible & (ceiling <= budget * nats_per_hz(ceiling, pairs.fading))
    limits = np.where(free, pairs.max_power_w, 0.0)
    bound = feasible & ~free
    if bound.any():
        limits[bound] = _energy_snr(budget[bound], pairs.fading) / slope[bound]
    return limits


def _energy_snr(budget: Floats, fading: str) -> Floats:
    """Return the ratio ρ > 0 with ρ = k·nats(ρ), for budgets k > 1."""
    # ρ = k·ln(1 + ρ) by the lower branch of Lambert's W, which loses digits as k nears 1.
    branch = lambertw(-np.exp(-1.0 / budget) / budget, -1).real
    snr = np.where(budget < _LAMBERT_FROM, _newton_root(budget), -budget * branch - 1.0)
    return _fading_root(budget, snr) if fading == "rayleigh" else snr


def _newton_root(budget: Floats) -> Floats:
    """Solve ρ = k·ln(1 + ρ) for k near 1 by Newton on (e^x - 1)/x - 1 = k - 1, x = ln(1 + ρ)."""
    target = np.minimum(budget, _LAMBERT_FROM) - 1.0
    x = np.log1p(2.0 * target)
    for _ in range(_NEWTON_STEPS):
        excess = np.zeros_like(x)
        # A series avoids cancellation: x/2·(1 + x/3·(1 + x/4·…)).
        for term in range(_SERIES_TERMS, 1, -1):
            excess = x / term * (1.0 + excess)
        x = x - (excess - target) / (1.0 + excess - excess / x)
    return np.expm1(x)


def _fading_root(budget: Floats, snr: Floats) -> Floats:
    """Solve ρ = k·g(ρ) for the mean g, from the root without fading.

    g is concave and below ln(1 + ρ), so Newton starts above the root and descends to it.
    """
    for _ in range(_FADING_STEPS):
        nats, shortfall = mean_nats_and_shortfall(snr)
        # k·g/ρ - 1 has two forms, each precise where the other loses digits.
        excess = np.where(snr < 1.0, budget - 1.0 - budget * shortfall, budget * nats / snr - 1.0)
        snr = snr - snr * excess / (budget * shortfall / snr - 1.0)
    return snr
