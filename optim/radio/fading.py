"""Rayleigh fading: what a channel carries in the mean over an exponentially distributed gain."""

import numpy as np
from scipy.special import exp1

from optim.problem import Floats

# From this 1/ρ on, ten terms of the continued fraction are exact to the last digit; the direct
# form loses digits there, and overflows beyond 700.
_FRACTION_FROM = 20.0
_FRACTION_TERMS = 10
# Two leave an error of 1e-7, three of 1e-14.
_NEWTON_STEPS = 3


def mean_nats_and_shortfall(snr: Floats) -> tuple[Floats, Floats]:
    """g = E ln(1 + ρX) = e^x·E₁(x), in nats, for a gain X with mean 1, and 1 - g/ρ = e^x·E₂(x).

    ``snr`` is the mean ratio ρ = 1/x ≥ 0, of any shape; both answers have the same. The second, the
    shortfall, comes without cancellation, and is also the derivative of g by ln ρ.
    """
    with np.errstate(divide="ignore"):
        x = 1.0 / np.asarray(snr, dtype=np.float64)
    weak = x >= _FRACTION_FROM
    direct = np.where(weak, 1.0, x)
    nats = np.exp(direct) * exp1(direct)
    shortfall = np.where(weak, _fraction(np.where(weak, x, 1.0)), 1.0 - direct * nats)
    return np.where(weak, snr * (1.0 - shortfall), nats), shortfall


def mean_snr(nats: Floats) -> tuple[Floats, Floats]:
    """The mean ratio ρ at which the channel carries ``nats`` > 0, and dρ/dnats."""
    # ln(e^y - 1), the answer without fading, and a factor that grows from 1 to e^0.577 = 1.78.
    log_snr = nats + np.log(-np.expm1(-nats)) + np.log1p(0.78 * nats / (1.0 + nats))
    shortfall = log_snr
    for _ in range(_NEWTON_STEPS):
        carried, shortfall = mean_nats_and_shortfall(np.exp(log_snr))
        log_snr = log_snr - (carried - nats) / shortfall
    snr = np.exp(log_snr)
    return snr, snr / shortfall


def _fraction(x: Floats) -> Floats:
    """e^x·E₂(x) for large x: 1/(x+2 - 2/(x+4 - 6/(x+6 - …)))."""
    tail = np.zeros_like(x)
    for term in range(_FRACTION_TERMS, 0, -1):
        tail = term * (term + 1) / (x + 2 * (term + 1) - tail)
    return 1.0 / (x + 2.0 - tail)
