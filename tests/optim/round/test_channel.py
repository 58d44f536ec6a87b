"""Rates, times and energy by definition, power limits by root finding, fading by quadrature."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq

from collapipe.state import Channel, Uplink
from optim.round.channel import (
    links,
    mean_nats_and_shortfall,
    nats_per_hz,
    power_limits,
    required_snr,
    upload_time,
)
from tests.optim import rounds

FADINGS: tuple[str, ...] = ("none", "rayleigh")


def limit(
    budget: float, slope: float, max_power_w: float, fading: str
) -> tuple[float, Uplink, Channel]:
    """Return p̄ of a pair with k = ``budget`` and a = ``slope`` per watt, and its uplink and
    channel."""
    channel = Channel(5e5, 0.07, 4e-21)
    gain = slope * (channel.interference_w + channel.bandwidth_hz * channel.noise_w_per_hz)
    bits = 1e7
    energy = budget / slope * bits * math.log(2) / channel.bandwidth_hz
    uplink = Uplink(max_power_w, energy, bits, 0.0, (gain,))
    pairs = links((uplink,), (channel,), fading, "all").at(0)
    return float(power_limits(pairs)[0, 0]), uplink, channel


def by_quadrature(snr: float) -> float:
    """Integrate E ln(1 + ρX) over ln x, which makes the integrand smooth."""

    def integrand(log_x: float) -> float:
        x = math.exp(log_x)
        return x * math.exp(-x) * math.log1p(snr * x)

    return math.fsum(
        quad(integrand, low, low + 5, epsabs=0, epsrel=1e-12)[0] for low in range(-40, 5, 5)
    )


@pytest.mark.parametrize("snr", np.logspace(-6, 8, 57))
def test_rayleigh_expectation_against_quadrature(snr: float) -> None:
    nats, _ = mean_nats_and_shortfall(np.array(snr))
    assert float(nats) == pytest.approx(by_quadrature(snr), rel=1e-10)


def test_rayleigh_expectation_does_not_jump_between_its_formulas() -> None:
    """The expectation rises, its slope over ln ρ is the shortfall, and the shortfall rises.

    The expectation stays between ½·ln(1 + 2ρ) and ln(1 + ρ).
    """
    snr = np.sort(
        np.concatenate([np.logspace(-12, 12, 2001), 0.05 * (1 + np.linspace(-1, 1) / 1e6)])
    )
    nats, shortfall = mean_nats_and_shortfall(snr)
    assert (np.diff(nats) > 0).all()
    assert (np.diff(shortfall) > 0).all()
    assert (nats < np.log1p(snr)).all()
    assert (nats > np.log1p(2 * snr) / 2 * (1 - 1e-12)).all()
    slopes = (nats[2:] - nats[:-2]) / np.log(snr[2:] / snr[:-2])
    wide = np.log(snr[2:] / snr[:-2]) > 0.05
    assert slopes[wide] == pytest.approx(shortfall[1:-1][wide], rel=1e-3)


def test_the_rate_without_power_is_zero() -> None:
    for fading in FADINGS:
        assert float(nats_per_hz(np.zeros(1), fading)[0]) == 0.0


@pytest.mark.parametrize("fading", FADINGS)
def test_required_snr_is_the_inverse_of_the_rate_per_hertz(fading: str) -> None:
    """Its derivative equals a finite difference, and rises."""
    nats = np.logspace(-9, 1.5, 400)
    snr, growth = required_snr(nats, fading)
    assert nats_per_hz(snr, fading) == pytest.approx(nats, rel=1e-12)
    higher, _ = required_snr(nats * (1 + 1e-6), fading)
    assert (higher - snr) / (nats * 1e-6) == pytest.approx(growth, rel=1e-4)
    assert (np.diff(growth) > 0).all()


@pytest.mark.parametrize("fading", FADINGS)
def test_rates_times_and_energies_follow_eqs_10_to_12(fading: str) -> None:
    """The energy counts all bits, or only the model's."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        problem = rounds.random_round(rng, "gamma", fading)
        pairs = links(problem.uplinks, problem.channels, fading, problem.options.energy).at(0)
        powers = rng.uniform(0.01, 2.0, pairs.gains.shape)
        rates, times = pairs.rates(powers), pairs.uploads(powers)
        energies = pairs.energies(powers)
        for (unit, channel), power in np.ndenumerate(powers):
            expected = rounds.rate(problem, unit, channel, power)
            assert rates[unit, channel] == pytest.approx(expected, rel=1e-9, abs=1e-9)
            uplink = problem.uplinks[unit]
            if expected:
                bits = uplink.model_bits + uplink.activation_bits
                assert times[unit, channel] == pytest.approx(bits / expected, rel=1e-9)
                joules = power * rounds.paid_bits(problem, unit) / expected
                assert energies[unit, channel] == pytest.approx(joules, rel=1e-9)
            else:
                assert times[unit, channel] == math.inf


def test_an_empty_upload_takes_no_time() -> None:
    assert upload_time(0.0, np.array([0.0, 1.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fading", FADINGS)
@pytest.mark.parametrize(
    "budget",
    [*(1 + np.logspace(-8.5, 0, 30)), *np.logspace(0.04, 6, 40), 1.0999999, 1.1, 1.1000001],
)
def test_the_power_limit_uses_up_the_energy(budget: float, fading: str) -> None:
    """The limit equals a root found by brentq, also near k = 1."""
    slope = 3.0
    found, _, _ = limit(budget, slope, 1e12, fading)

    # ρ = k·nats(ρ), written as shortfall = 1 - 1/k: near k = 1 the first form loses all digits.
    def excess(log_snr: float) -> float:
        snr = math.exp(log_snr)
        if fading == "rayleigh":
            return float(mean_nats_and_shortfall(np.array(snr))[1]) - (budget - 1) / budget
        if snr > 0.01:
            return (snr - math.log1p(snr)) / snr - (budget - 1) / budget
        series = math.fsum(-((-snr) ** n) / (n + 1) for n in range(1, 9))
        return series - (budget - 1) / budget

    root = math.exp(brentq(excess, -45.0, 60.0, xtol=1e-15, rtol=1e-15))
    assert found * slope == pytest.approx(root, rel=1e-7 if budget < 1 + 1e-6 else 2e-10)


@given(st.floats(1e-3, 1e4), st.floats(1e-2, 1e6), st.floats(1e-4, 1e2), st.sampled_from(FADINGS))
def test_power_limits_are_feasible_and_as_large_as_possible(
    budget: float, slope: float, max_power_w: float, fading: str
) -> None:
    """The limit is 0 exactly if the energy suffices for no power; otherwise C6 or C8 is tight."""
    found, uplink, channel = limit(budget, slope, max_power_w, fading)
    assert 0 <= found <= max_power_w
    assert (found > 0) == (budget > 1 + 1e-9)
    if not found:
        return
    spent = float(links((uplink,), (channel,), fading, "all").at(0).energies(np.array(found))[0, 0])
    assert spent <= uplink.energy_j * (1 + 1e-12)
    assert found == max_power_w or spent == pytest.approx(uplink.energy_j, rel=1e-11)


def test_power_limits_of_extreme_uplinks() -> None:
    """Without gain, power or energy the limit is 0; with no bits or ample energy it is P^max."""
    channel = Channel(5e5, 0.07, 4e-21)
    cases = {
        (0.5, 10.0, 1e6, 0.0): 0.0,
        (0.0, 10.0, 1e6, 1.0): 0.0,
        (0.5, 0.0, 1e6, 1.0): 0.0,
        (0.5, 0.0, 0.0, 1.0): 0.5,
        (0.5, 1e18, 1e6, 1.0): 0.5,
        (0.5, 1e18, 1e6, 0.0): 0.0,
    }
    uplinks = tuple(Uplink(p, e, bits, 0.0, (gain,)) for p, e, bits, gain in cases)
    for fading in FADINGS:
        found = power_limits(links(uplinks, (channel,), fading, "all").at(0))
        assert found[:, 0].tolist() == list(cases.values())


def test_fading_lowers_power_limits_and_raises_the_required_snr() -> None:
    """The mean rate is below the rate at the mean gain, so fading also lowers the power limit."""
    for budget in (1.5, 10.0, 1e3):
        assert limit(budget, 2.0, 1e9, "rayleigh")[0] < limit(budget, 2.0, 1e9, "none")[0]
    nats = np.array([0.1, 1.0, 5.0])
    assert (required_snr(nats, "rayleigh")[0] > required_snr(nats, "none")[0]).all()
