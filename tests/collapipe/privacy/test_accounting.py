"""ε agrees with the closed form of the Gaussian mechanism and with theoretical bounds."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sections import privacy_settings

from collapipe.privacy.accounting import affordable_rounds, epsilon
from collapipe.sections import PrivacySettings

PAGE = Path(__file__).parents[3] / "docs/how-to/private-runs.md"


def private(noise_multiplier: float) -> PrivacySettings:
    return privacy_settings(clip_norm=1.0, noise_multiplier=noise_multiplier)


def by_units(noise_multiplier: float) -> PrivacySettings:
    return replace(private(noise_multiplier), secure_aggregation=True, noise_by="units")


def delta_of(epsilon: float, noise_multiplier: float, rounds: int) -> float:
    """δ(ε) of the Gaussian mechanism after ``rounds`` rounds (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(rounds) / noise_multiplier
    tail = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
    return float(norm.cdf(-epsilon / mu + mu / 2)) - tail


@given(st.floats(0.5, 50), st.integers(1, 500))
def test_epsilon_matches_the_gaussian_mechanism(noise_multiplier: float, rounds: int) -> None:
    settings = private(noise_multiplier)
    found = epsilon(settings, rounds)
    assert found == 0 or delta_of(found, noise_multiplier, rounds) == pytest.approx(
        settings.delta, rel=1e-5
    )


@given(st.sampled_from([private, by_units]), st.floats(1, 50), st.floats(0.1, 20))
def test_affordable_rounds_are_the_most_within_the_limit_of_epsilon(
    by: Callable[[float], PrivacySettings], noise_multiplier: float, limit: float
) -> None:
    settings = by(noise_multiplier)
    most = affordable_rounds(settings, limit)
    assert epsilon(settings, most) <= limit * (1 + 1e-9)
    assert epsilon(settings, most + 1) > limit


@given(st.floats(1, 50), st.integers(1, 500))
def test_epsilon_of_the_units_noise_is_within_its_theoretical_bounds(
    noise: float, rounds: int
) -> None:
    """The ε of the units' noise is at least the Gaussian mechanism's ε.

    The upper bound is ρ + 2·√(ρ·ln 1/δ), the ε of ρ-concentrated privacy (Bun and Steinke 2016,
    proposition 1.3).
    """
    settings = by_units(noise)
    found = epsilon(settings, rounds)
    rho = rounds / (2 * noise**2)
    assert found <= rho + 2 * math.sqrt(rho * math.log(1 / settings.delta))
    assert found >= epsilon(private(noise), rounds)


def test_epsilon_is_0_before_the_first_round_and_infinite_without_noise() -> None:
    assert epsilon(private(4), 0) == 0
    assert epsilon(private(0), 1) == math.inf


def test_the_page_has_these_epsilons() -> None:
    """The range in per cent is that of the same noise multipliers and rounds."""
    page, more = PAGE.read_text(), list[float]()
    for noise, *documented in re.findall(r"^\| (\d+)" + r" \| ([\d.]+)" * 4 + r" \|$", page, re.M):
        for rounds, text in zip((1, 10, 40, 100), documented, strict=True):
            found = epsilon(private(float(noise)), rounds)
            assert float(text) == float(f"{found:.2g}")
            more.append(epsilon(by_units(float(noise)), rounds) / found - 1)
    assert f"ε is {100 * min(more):.0f} to {100 * max(more):.0f} % larger" in page
