"""Averages and server optimisers against the same formulas in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sections import server_optimizer_settings

from collapipe.sections import ServerOptimizerSettings
from collapipe.tensors import Tensors
from server_app.rounds.global_model import ServerOptimizer, average

Arrays = dict[str, NDArray[np.float64]]
SHAPES = {"embedding.tokens.weight": (3, 2), "head.norm.bias": (4,), "scale": ()}
ROUNDS = 3


def random_model(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """A few weights of different shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


def arrays(model: Tensors) -> Arrays:
    """A copy of the weights as NumPy arrays."""
    return {name: tensor.double().numpy().copy() for name, tensor in model.items()}


def assert_close(model: Tensors, expected: Arrays) -> None:
    """Assert that weights are equal within rounding in double precision."""
    assert list(model) == list(expected)
    for name, tensor in model.items():
        assert tensor.dtype == torch.float64
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=0, atol=1e-12)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_average_is_weighted(weights: list[int]) -> None:
    """Σ w θ / Σ w; weights need not sum to one."""
    models = [random_model(seed) for seed in range(len(weights))]
    expected = {
        name: np.average([arrays(model)[name] for model in models], axis=0, weights=weights)
        for name in SHAPES
    }
    assert_close(average(models, weights), expected)


def test_the_average_of_dyadic_numbers_is_exact() -> None:
    """Dyadic numbers need no rounding in the weights' own precision."""
    models = [{"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([2.0, -8.0])}]
    averaged = average(models, [3, 1])
    assert torch.equal(averaged["w"], torch.tensor([1.25, 1.0]))
    assert averaged["w"].dtype == torch.float32
    assert torch.equal(models[0]["w"], torch.tensor([1.0, 4.0]))  # models are not changed
    alone = average(models[:1], [3])
    alone["w"].zero_()
    assert torch.equal(models[0]["w"], torch.tensor([1.0, 4.0]))


@pytest.mark.parametrize("name", ["fedavg", "sgd", "fedavgm", "fedadam"])
def test_integer_and_bool_buffers_are_copied_from_the_first_model(name: str) -> None:
    """A buffer of counts or of a mask has no average and no gradient."""
    counted = [
        {"w": torch.tensor([float(n)]), "n": torch.tensor(n), "mask": torch.tensor([n == 1])}
        for n in (1, 2)
    ]
    averaged = average(counted, [1, 3])
    stepped = ServerOptimizer(server_optimizer_settings(name, lr=1.0)).step(counted[1], averaged)
    for model in (averaged, stepped):
        assert list(model) == ["w", "n", "mask"]
        assert torch.equal(model["n"], torch.tensor(1))
        assert torch.equal(model["mask"], torch.tensor([True]))
    assert averaged["w"] == 1.75


def test_average_needs_exactly_one_weight_for_each_model() -> None:
    with pytest.raises(ValueError, match="zip"):
        average([random_model(0), random_model(1)], [1.0])
    with pytest.raises(ValueError, match="zip"):
        average([random_model(0)], [1.0, 1.0])


def test_fedavg_returns_the_average() -> None:
    """The result and the average are equal bit for bit."""
    averaged = random_model(1)
    stepped = ServerOptimizer(server_optimizer_settings("fedavg")).step(random_model(0), averaged)
    assert stepped.keys() == averaged.keys()
    assert all(torch.equal(stepped[name], averaged[name]) for name in averaged)


def test_sgd_with_rate_one_equals_fedavg() -> None:
    """θ − 1 · (θ − average) = average."""
    optimizer = ServerOptimizer(server_optimizer_settings("sgd", lr=1.0))
    for round_ in range(ROUNDS):
        averaged = random_model(10 + round_)
        assert_close(optimizer.step(random_model(round_), averaged), arrays(averaged))


def sgd_by_hand(settings: ServerOptimizerSettings, start: Arrays, averages: list[Arrays]) -> Arrays:
    """v ← β v + Δ; θ ← θ − η v, with Δ = θ − average."""
    momentum = settings.momentum if settings.name == "momentum" else 0.0
    theta, velocity = start, {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for averaged in averages:
        for name in SHAPES:
            velocity[name] = momentum * velocity[name] + theta[name] - averaged[name]
        theta = {name: theta[name] - settings.lr * velocity[name] for name in SHAPES}
    return theta


def adam_by_hand(
    settings: ServerOptimizerSettings, start: Arrays, averages: list[Arrays]
) -> Arrays:
    """Kingma & Ba 2015, algorithm 1, with its bias correction, on Δ = θ − average."""
    beta1, beta2 = settings.momentum, settings.beta2
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    theta = start
    for round_, averaged in enumerate(averages, start=1):
        delta = {name: theta[name] - averaged[name] for name in SHAPES}
        stepped = {}
        for name in SHAPES:
            first[name] = beta1 * first[name] + (1 - beta1) * delta[name]
            second[name] = beta2 * second[name] + (1 - beta2) * delta[name] ** 2
            mean, square = first[name] / (1 - beta1**round_), second[name] / (1 - beta2**round_)
            stepped[name] = theta[name] - settings.lr * mean / (np.sqrt(square) + settings.eps)
        theta = stepped
    return theta


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        (server_optimizer_settings("sgd", lr=0.3, momentum=0.9), sgd_by_hand),
        (server_optimizer_settings("fedavgm", lr=0.3, momentum=0.8), sgd_by_hand),
        (
            server_optimizer_settings("fedadam", lr=0.1, momentum=0.7, beta2=0.95, eps=0.01),
            adam_by_hand,
        ),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_three_rounds_equal_the_formulas_in_numpy(
    settings: ServerOptimizerSettings, by_hand: object
) -> None:
    """The optimiser keeps its state between rounds and does not change its arguments."""
    assert callable(by_hand)
    start, averages = random_model(0), [random_model(10 + round_) for round_ in range(ROUNDS)]
    given_ = [arrays(model) for model in (start, *averages)]
    optimizer, theta = ServerOptimizer(settings), start
    models = [start]
    for averaged in averages:
        theta = optimizer.step(theta, averaged)
        models.append(theta)
    assert_close(theta, by_hand(settings, arrays(start), [arrays(model) for model in averages]))
    for model, before in zip((start, *averages), given_, strict=True):
        assert_close(model, before)
    assert_close(models[1], by_hand(settings, given_[0], given_[1:2]))  # nor earlier results


def test_the_pseudo_gradient_starts_from_the_weights_of_its_round() -> None:
    """The step starts from the round's first weights, even if the optimiser did not make them."""
    optimizer = ServerOptimizer(server_optimizer_settings("sgd", lr=0.5))
    optimizer.step(random_model(0), random_model(1))
    previous, averaged = random_model(2), random_model(3)
    expected = {name: (arrays(previous)[name] + arrays(averaged)[name]) / 2 for name in SHAPES}
    assert_close(optimizer.step(previous, averaged), expected)
