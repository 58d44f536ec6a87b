"""Γ, the queues and Theorem 1 against their definitions."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError
from collapipe.models.split import through
from collapipe.models.transformer import EncoderBlock, TransformerSpec
from collapipe.state import Channel, Uplink
from optim.round.channel import links
from optim.round.convergence import (
    gamma_power,
    idle_gamma,
    interference_error,
    next_queues,
    round_gammas,
    scheduled_gamma,
)
from optim.round.problem import Allocation, RoundOptions
from tests.optim import rounds
from tests.optim.theorem1 import (
    Descent,
    check_step_size,
    contraction,
    optimality_gap,
    step_size_limit,
)

SMALL = st.floats(0.01, 10.0)


def test_gammas_of_a_round_follow_eq_28() -> None:
    """Units that are not scheduled have p = 0 and S = 0."""
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(40):
        problem = rounds.random_round(rng, "gamma")
        allocations = [
            Allocation(unit, unit, float(rng.uniform(0, 2)), 1.0, 2.0, front[-1])
            for unit, front in enumerate(problem.fronts)
            if front and unit < len(problem.channels)
        ]
        expected = [rounds.idle(problem)] * len(problem.fronts)
        for each in allocations:
            seen += 1
            expected[each.unit] = rounds.gamma(
                problem, each.unit, each.channel, each.partition, each.power_w
            )
        assert round_gammas(problem, allocations) == pytest.approx(expected, rel=1e-14)
    assert seen > 20


def test_gamma_of_idle_and_scheduled_units_in_the_preset() -> None:
    """Γ is about 1.24 for an idle unit and about 0.25 for a scheduled one."""
    channels = (Channel(5e5, 0.06, 4e-21), Channel(5e5, 0.08, 4e-21))
    options = RoundOptions(segment_price="paper")
    assert idle_gamma(channels, options) == pytest.approx(0.08 / 0.07 + 0.1)
    error = interference_error(0.5, 0.977, 0.07, 0.08)
    assert float(scheduled_gamma(1, error, 12, options)) == pytest.approx(0.25, abs=0.01)


def test_channels_without_interference_are_refused() -> None:
    """The Γ of an idle unit would be infinite, unless the interference constant is 0."""
    silent = (Channel(5e5, 0.0, 4e-21),)
    with pytest.raises(ConfigError, match=r"interference_constant_w=0\.08 with interference_w=0"):
        idle_gamma(silent, RoundOptions())
    assert idle_gamma(silent, RoundOptions(interference_constant_w=0.0)) == pytest.approx(0.1)


@given(st.integers(1, 8), SMALL, SMALL, st.floats(0.05, 3.0), st.sampled_from([0.0, 0.08, 0.5]))
def test_gamma_power_is_the_least_within_the_limit(
    segments: int, gain: float, interference: float, gamma_max: float, constant: float
) -> None:
    options = RoundOptions(
        gamma_max=gamma_max, interference_constant_w=constant, segment_price="paper"
    )
    problem = rounds.random_round(np.random.default_rng(0), "gamma")
    problem = type(problem)((), (), (), (), problem.num_blocks, options)

    def gamma(power: float) -> float:
        error = interference_error(power, gain, interference, constant)
        return float(scheduled_gamma(segments, error, problem.num_blocks, options))

    pairs = links(
        [Uplink(1.0, 1.0, 1.0, 0.0, (gain,))], [Channel(1.0, interference, 0.0)], "none", "all"
    )
    power = gamma_power(np.array([float(segments)]), pairs, problem).item()
    if math.isinf(power):
        assert gamma(1e15) > gamma_max
    else:
        assert gamma(power) <= gamma_max * (1 + 1e-11)
        assert power == 0 or gamma(power * 0.999) > gamma_max or power < 1e-9


@pytest.mark.parametrize("segments", [1, 3, 8])
def test_a_limit_that_is_met_exactly_needs_no_power(segments: int) -> None:
    """The interference constant is 0, so Γ does not depend on the power."""
    problem = rounds.random_round(np.random.default_rng(0), "gamma")
    options = RoundOptions(interference_constant_w=0.0, segment_price="paper")
    met = float(scheduled_gamma(segments, np.zeros(()), problem.num_blocks, options))
    options = replace(options, gamma_max=met)
    problem = replace(problem, options=options)
    pairs = links([Uplink(1.0, 1.0, 1.0, 0.0, (1.0,))], [Channel(1.0, 0.1, 0.0)], "none", "all")
    assert gamma_power(np.array([float(segments)]), pairs, problem).item() == 0


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 3)), max_size=6), st.floats(0, 3))
def test_queues_follow_eq_29(pairs: list[tuple[float, float]], gamma_max: float) -> None:
    """A queue changes by Γ - Γ^max, but never falls below 0 (eq. 29)."""
    queues, gammas = [y for y, _ in pairs], [g for _, g in pairs]
    after = next_queues(queues, gammas, gamma_max)
    for before, gamma, queue in zip(queues, gammas, after, strict=True):
        assert queue == max(0.0, before + gamma - gamma_max)


def bound_in_full(descent: Descent, gap: float, segments: list[int], errors: list[float]) -> float:
    """Return eq. (23) with sums and products as printed, except for the missing bracket."""
    rounds_, rate, units = len(segments), descent.learning_rate, descent.num_units
    sigmas = [
        rate * descent.curvature
        - descent.smoothness * rate**2 / 2 * (1 + s**2 / units / descent.num_blocks)
        for s in segments
    ]
    total = math.prod(1 - 2 * sigma for sigma in sigmas) * gap
    for t in range(rounds_):
        later = math.prod(1 - sigma for sigma in sigmas[t + 1 :])
        task = descent.smoothness * rate**2 * descent.gradient_bound / units
        total += later * task * (segments[t] ** 2 / descent.num_blocks + 1)
        total += later * rate / units * errors[t]
    return total


@given(
    st.lists(st.tuples(st.integers(1, 6), st.floats(0, 2)), max_size=8),
    st.floats(0.001, 0.3),
    st.floats(0.1, 3.0),
)
def test_the_optimality_gap_equals_theorem_1_in_full(
    steps: list[tuple[int, float]], rate: float, curvature: float
) -> None:
    descent = Descent(1.3, 0.2, curvature, rate, 4, 12)
    segments, errors = [s for s, _ in steps], [e for _, e in steps]
    expected = bound_in_full(descent, 2.5, segments, errors)
    assert optimality_gap(descent, 2.5, segments, errors) == pytest.approx(expected, abs=1e-9)


def test_theorem_1_weighs_segments_and_interference() -> None:
    """More segments or interference raise the bound, and more units lower it (remarks 1 and 2)."""
    descent = Descent(1.0, 0.1, 0.5, 0.05, 4, 12)
    base = optimality_gap(descent, 1.0, [2] * 50, [0.2] * 50)
    assert optimality_gap(descent, 1.0, [4] * 50, [0.2] * 50) > base
    assert optimality_gap(descent, 1.0, [2] * 50, [0.4] * 50) > base
    many = Descent(1.0, 0.1, 0.5, 0.05, 8, 12)
    assert optimality_gap(many, 1.0, [2] * 50, [0.2] * 50) < base


@given(SMALL, SMALL, st.integers(1, 20), st.integers(1, 48), st.data())
def test_the_check_of_the_step_size_requires_a_positive_sigma(
    smoothness: float, curvature: float, units: int, blocks: int, data: st.DataObject
) -> None:
    """σ > 0 needs at most half of the theorem's step limit; the check warns if σ ≤ 0."""
    segments = data.draw(st.integers(1, blocks))
    limit = step_size_limit(Descent(smoothness, 0.1, curvature, 1.0, units, blocks), segments)
    assert limit == pytest.approx(
        4 * curvature * units * blocks / smoothness / (segments**2 + blocks)
    )
    size = units * blocks
    needed = 2 * curvature * size / smoothness / (size + segments**2)
    assert needed <= limit / 2 * (1 + 1e-12)
    for factor, fine in ((0.999, True), (1.001, False)):
        descent = Descent(smoothness, 0.1, curvature, factor * needed, units, blocks)
        assert (contraction(descent, segments) > 0) == fine
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_step_size(descent, segments)
        assert len(caught) == (not fine)


def test_the_warning_names_the_learning_rate_and_its_limits() -> None:
    with pytest.warns(
        UserWarning,
        match=r"learning rate 5 with S=3 .* below 0\.771 \(the theorem itself says 5\.57\)",
    ):
        check_step_size(Descent(1.0, 0.1, 0.4, 5.0, 4, 60), 3)


def test_lemma_1_fails_as_printed_if_s_squared_is_below_l() -> None:
    """With one unit, 12 blocks, no decoder and S = 1, ‖∇F‖² is 12 times its bound in eq. (20).

    ‖∇F‖² is measured as the slope of the loss along the gradient. The bound uses each block's
    gradient.
    """
    torch.manual_seed(0)
    spec = TransformerSpec(dim=8, num_heads=2, feed_forward_dim=16)
    blocks = torch.nn.ModuleList(EncoderBlock(spec) for _ in range(12)).double()
    blocks.eval()  # no dropout
    hidden, mask = torch.randn(2, 5, 8).double(), torch.ones(2, 5, dtype=torch.bool)
    target = torch.randn(2, 5, 8).double()

    def loss() -> torch.Tensor:
        return (through(blocks, hidden, mask) - target).square().mean()

    loss().backward()
    weights = [each for each in blocks.parameters() if each.grad is not None]
    gradients = [each.grad.clone() for each in weights if each.grad is not None]
    losses = []
    with torch.no_grad():
        for step in (1e-9, -2e-9):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight += step * gradient
            losses.append(loss().item())
    measured = (losses[0] - losses[1]) / 2e-9
    of_blocks = [
        sum(float(each.grad.square().sum()) for each in block.parameters() if each.grad is not None)
        for block in blocks
    ]
    for segments in (1, 2, 3, 4, 6, 12):
        bound = segments**2 / 12 * sum(of_blocks)
        assert measured / bound == pytest.approx(12 / segments**2, rel=1e-4)
        assert (measured <= bound) == (segments**2 >= 12)
