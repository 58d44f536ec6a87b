"""ε against the closed form of the Gaussian mechanism, and what chance is worth."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from collapipe.privacy.accounting import Draw, affordable_rounds, epsilon
from collapipe.sections import PrivacySettings

EVERYBODY = Draw(3, 3)


def private(noise_multiplier: float) -> PrivacySettings:
    return PrivacySettings(clip_norm=1.0, noise_multiplier=noise_multiplier)


def by_units(noise_multiplier: float) -> PrivacySettings:
    return replace(private(noise_multiplier), secure_aggregation=True, noise_by="units")


def delta_of(epsilon: float, noise_multiplier: float, rounds: int) -> float:
    """δ(ε) of the Gaussian mechanism after some rounds (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(rounds) / noise_multiplier
    tail = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
    return float(norm.cdf(-epsilon / mu + mu / 2)) - tail


@given(st.floats(0.5, 50), st.integers(1, 500))
def test_it_is_that_of_the_gaussian_mechanism(noise_multiplier: float, rounds: int) -> None:
    settings = private(noise_multiplier)
    found = epsilon(settings, [EVERYBODY] * rounds, by_chance=False)
    assert found == 0 or delta_of(found, noise_multiplier, rounds) == pytest.approx(
        settings.delta, rel=1e-5
    )


@given(st.sampled_from([private, by_units]), st.floats(1, 50), st.floats(0.1, 20))
def test_as_many_rounds_as_stay_within_a_limit(
    by: Callable[[float], PrivacySettings], noise_multiplier: float, limit: float
) -> None:
    settings = by(noise_multiplier)
    most = affordable_rounds(settings, limit)
    assert epsilon(settings, [EVERYBODY] * most, by_chance=False) <= limit * (1 + 1e-9)
    assert epsilon(settings, [EVERYBODY] * (most + 1), by_chance=False) > limit


@given(st.floats(1, 50), st.integers(1, 500))
def test_noise_of_the_units_is_worth_what_its_concentration_says(noise: float, rounds: int) -> None:
    """No less than the Gaussian's own ε, no more than ρ + 2·√(ρ·ln 1/δ) of ρ-concentrated privacy
    (Bun and Steinke 2016, proposition 1.3)."""
    settings = by_units(noise)
    found = epsilon(settings, [EVERYBODY] * rounds, by_chance=True)
    rho = rounds / (2 * noise**2)
    assert found <= rho + 2 * math.sqrt(rho * math.log(1 / settings.delta))
    assert found >= epsilon(private(noise), [EVERYBODY] * rounds, by_chance=False)


def test_before_the_first_round_nothing_is_told_and_without_noise_all() -> None:
    assert epsilon(private(4), [], by_chance=True) == 0
    assert epsilon(private(0), [EVERYBODY], by_chance=False) == math.inf


def test_a_choice_by_chance_is_worth_something_where_few_of_many_are_chosen() -> None:
    few, all_of_them = [Draw(100, 5)] * 20, [Draw(5, 5)] * 20
    certain = epsilon(private(4), few, by_chance=False)
    assert epsilon(private(4), few, by_chance=True) < certain / 2
    assert epsilon(private(4), all_of_them, by_chance=True) == certain
