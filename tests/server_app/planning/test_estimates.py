"""Estimates of β, φ² and ξ from training, compared with a loss whose constants are known."""

from pathlib import Path

import numpy as np
import pytest
from federated import play
from run_files import rounds_of, summary_of

from collapipe.state import Estimates
from server_app.planning.estimates import RoundObservation, estimate


def test_estimates_for_a_quadratic_are_bounds_of_its_constants() -> None:
    """F(θ) = Σ a·θ²/2 with F* = 0 has ξ = min a and β = max a; estimates are bounds of both."""
    curvatures, point, rate = np.array([0.5, 2.0]), np.array([3.0, 1.0]), 0.3
    estimates, last, norms = Estimates(), None, []
    for _ in range(40):
        gradient = curvatures * point
        norms.append(float(gradient @ gradient))
        now = RoundObservation(norms[-1], float(curvatures @ point**2 / 2), rate * norms[-1] ** 0.5)
        estimates, last, point = estimate(estimates, last, now), now, point - rate * gradient
    assert estimates.gradient_bound == max(norms)
    assert estimates.smoothness is not None
    assert estimates.curvature is not None
    assert 0.4 <= estimates.smoothness <= 2.0
    assert 0.5 <= estimates.curvature <= 2.0
    assert estimates.curvature == pytest.approx(0.5, rel=1e-3)  # only the flat direction remains


def test_estimates_are_the_extremes_of_all_rounds() -> None:
    """A later round with smaller values does not change the estimates."""
    before, last = Estimates(50.0, 7.0, 0.1), RoundObservation(4.0, 1.0, 0.5)
    assert estimate(before, last, RoundObservation(4.0, 1.0, 0.5)) == before


def test_the_first_round_gives_no_estimate_of_smoothness() -> None:
    shown = estimate(Estimates(), None, RoundObservation(4.0, 2.0, 0.1))
    assert shown == Estimates(gradient_bound=4.0, smoothness=None, curvature=1.0)


def test_a_loss_near_zero_gives_no_estimate_of_curvature() -> None:
    """The quotient would be infinite, and JSON has no infinity."""
    assert estimate(Estimates(), None, RoundObservation(1e99, 5e-324, 0.1)).curvature is None


def test_smoothness_uses_the_step_length_of_the_earlier_round() -> None:
    """The gradient changed from 2 to 5 while the first round moved the model by 0.5."""
    shown = estimate(Estimates(), RoundObservation(4.0, 1.0, 0.5), RoundObservation(25.0, 1.0, 9.0))
    assert shown.smoothness == pytest.approx(3 / 0.5)


def test_a_run_records_the_set_and_the_estimated_constants(tmp_path: Path) -> None:
    play(tmp_path, "federation.rounds=3", "strategy.constants=estimated")
    summary = summary_of(tmp_path)["constants"]
    lines = rounds_of(tmp_path)
    assert summary["source"] == "estimated"
    assert summary["set"]["kappa"] == 1
    assert summary["estimated"] == lines[-1]["estimates"]
    assert lines[0]["estimates"]["smoothness"] is None
    assert lines[1]["estimates"]["smoothness"] > 0
    # Round 3 is the first that is planned with estimates: η is small, so is Γ.
    assert max(lines[1]["plan"]["gammas"]) > 0.1
    assert 0 < max(lines[2]["plan"]["gammas"]) < 0.1 * max(lines[1]["plan"]["gammas"])
