"""The learning rate of each step: a linear warm-up, then constant or falling."""

import pytest
from sections import optimizer_settings


@pytest.mark.parametrize("decay", ["constant", "linear", "inverse_sqrt"])
def test_the_learning_rate_rises_to_lr_in_equal_steps(decay: str) -> None:
    settings = optimizer_settings(lr=0.8, warmup_steps=4, decay=decay)
    rates = [settings.rate(step, 20) for step in range(4)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert settings.rate(4, 20) <= 0.8


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_a_linear_decay_falls_in_equal_steps_to_0_after_the_last_one(warmup_steps: int) -> None:
    settings = optimizer_settings(lr=0.5, warmup_steps=warmup_steps, decay="linear")
    expected = [0.5 * (25 - step) / (25 - warmup_steps) for step in range(warmup_steps, 25)]
    assert [settings.rate(step, 25) for step in range(warmup_steps, 25)] == pytest.approx(expected)
    assert settings.rate(warmup_steps, 25) == pytest.approx(0.5)
    assert {settings.rate(step, 25) for step in range(25, 60)} == {0.0}


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_an_inverse_square_root_halves_after_four_times_the_steps(warmup_steps: int) -> None:
    settings = optimizer_settings(lr=0.5, warmup_steps=warmup_steps, decay="inverse_sqrt")
    assert settings.rate(max(0, warmup_steps - 1), 9) == pytest.approx(0.5)
    for steps in range(warmup_steps + 1, 40):
        assert settings.rate(4 * steps - 1, 9) == pytest.approx(settings.rate(steps - 1, 9) / 2)


def test_a_constant_learning_rate_stays() -> None:
    settings = optimizer_settings(lr=0.5, warmup_steps=2, decay="constant")
    assert {settings.rate(step, 9) for step in range(1, 30)} == {0.5}
