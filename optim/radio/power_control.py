"""Power of the scheduled units (eq. 42): Dinkelbach's transform and convex approximation."""

import warnings
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from optim.problem import Floats
from optim.radio.channel import Links, mean_nats_and_shortfall

_ITERATIONS = 50
_HALVINGS = 20
# Relative precision of the conic solver.
_PROGRESS = 1e-9
# Signal-to-noise ratios at full power are clipped to this range in the approximation of r.
_BENDS = (1.0, 1e4)


@dataclass(frozen=True, slots=True)
class Senders:
    """The A units with a channel, and the cost of their power; all arrays are [A]."""

    links: Links
    low_w: Floats  # C6, C8 and C11 allow powers from low_w to high_w > 0
    high_w: Floats
    watt_price: Floats  # drift per watt: Y of drift ``paper``
    error_price: Floats  # drift per unit of 1/(p·h + I): Y·κ·C of drift ``gamma``
    drift_weight: float

    def errors(self, power_w: Floats) -> Floats:
        """Return 1/(p·h + I), or 0 if its price is 0."""
        received = power_w * self.links.gains + self.links.interference_w
        return np.divide(1.0, received, out=np.zeros_like(received), where=self.error_price > 0)

    def cost(self, power_w: Floats) -> float:
        """Return Υ(p) of eq. 35: V times the longest upload, plus the drift that depends on p."""
        drift = self.watt_price @ power_w + self.error_price @ self.errors(power_w)
        return float(self.drift_weight * self.links.uploads(power_w).max() + drift)


def controlled_power(senders: Senders, power_w: Floats) -> Floats:
    """Return the power [A], W, that minimises ``Senders.cost``, from a feasible start.

    Each step solves a convex programme at the current p and moves towards its solution as long as
    the cost falls; the cost is convex, so the iteration ends at its minimum. With λ the longest
    upload (Dinkelbach's parameter), the programme is

        min V·t + Σ price·p   with   t ≥ λ + (z + θ - λ·r(p)) / r(p_now)   for each unit.

    Eqs. 42 to 44 are read differently (docs/explanation/paper.md): division by r(p_now) turns bits
    into seconds, t bounds each unit instead of the sum, and C8 and C11 are exact limits instead of
    tangents.
    Two functions are approximated: r, under fading or at extreme values, by a logarithm with its
    value and slope at p_now, and the drift ``gamma`` by its tangent (g_1 and g_2 of eq. 44).
    """
    programme = _Programme(senders)
    cost = senders.cost(power_w)
    for _ in range(_ITERATIONS):
        step = programme.solve(power_w) - power_w
        nearer = (power_w + step / 2**halving for halving in range(_HALVINGS))
        reached = next((each for each in nearer if senders.cost(each) < cost), None)
        if reached is None:
            break
        power_w, before, cost = reached, cost, senders.cost(reached)
        if before - cost <= _PROGRESS * abs(cost):
            break
    return power_w


class _Programme:
    """The convex programme, compiled once, for any p_now.

    Quantities are scaled for the solver: p by its upper limit, t by λ, prices by the largest price.
    """

    def __init__(self, senders: Senders) -> None:
        size, snr = senders.low_w.size, senders.links.snr_per_watt * senders.high_w
        self._senders, self._bend = senders, np.clip(snr, *_BENDS)
        self._share = cp.Variable(size, bounds=[senders.low_w / senders.high_w, 1])
        longest = cp.Variable(nonneg=True)
        self._steepness, self._level = cp.Parameter(size, nonneg=True), cp.Parameter(size)
        self._delay_price, self._prices = cp.Parameter(nonneg=True), cp.Parameter(size)
        carried = cp.multiply(self._steepness, cp.log(1 + cp.multiply(self._bend, self._share)))
        self._problem = cp.Problem(
            cp.Minimize(self._delay_price * longest + self._prices @ self._share),
            [longest + carried >= self._level],
        )

    def solve(self, power_w: Floats) -> Floats:
        """Return the solution at p_now, or p_now if the problem is too badly scaled to solve."""
        self._centre(power_w)
        try:
            with warnings.catch_warnings():  # inexact answers suffice: each step's cost is checked
                warnings.simplefilter("ignore")
                self._problem.solve(solver=cp.CLARABEL)
        except cp.SolverError:
            return power_w
        share: Floats = self._share.value
        limits = self._senders.low_w, self._senders.high_w
        return np.asarray(np.clip(share * self._senders.high_w, *limits))

    def _centre(self, power_w: Floats) -> None:
        senders, seconds = self._senders, self._senders.links.uploads(power_w)
        bent, slope = self._bend * power_w / senders.high_w, _elasticity(senders.links, power_w)
        steepness = np.divide(slope * (1 + bent), bent, out=np.zeros_like(bent), where=bent > 0)
        delay, errors = senders.drift_weight * seconds.max(), senders.errors(power_w)
        # The drift over the whole range of each power, at its slope at p.
        slopes = senders.watt_price - senders.error_price * senders.links.gains * errors**2
        prices = slopes * senders.high_w
        largest = max(delay, np.abs(prices).max()) or 1.0
        self._steepness.value = steepness
        self._level.value = seconds / (seconds.max() or 1.0) + steepness * np.log1p(bent)
        self._delay_price.value, self._prices.value = delay / largest, prices / largest


def _elasticity(links: Links, power_w: Floats) -> Floats:
    """Return d ln r / d ln p, 0 … 1; 0 at power 0."""
    snr = links.snr_per_watt * power_w
    if links.fading == "rayleigh":
        nats, rise = mean_nats_and_shortfall(snr)
    else:
        nats, rise = np.log1p(snr), snr / (1 + snr)
    return np.divide(rise, nats, out=np.zeros_like(snr), where=nats > 0)
