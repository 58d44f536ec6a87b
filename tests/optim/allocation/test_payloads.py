"""Payloads are chosen jointly with all other decisions, as well as by enumeration."""

from dataclasses import replace

import numpy as np
import pytest

from collapipe.errors import PlanViolationError
from collapipe.state import Payload, Uplink
from optim.allocation.exact import exact_allocation
from optim.round.convergence import next_error_queues
from optim.round.problem import RoundProblem
from optim.verify import verify_round
from tests.optim import rounds
from tests.optim.allocation.test_streamed import Round, best_allocations, each_law
from tests.optim.allocation.test_streamed import random_round as random_clusters
from tests.thorough import cases


def with_payloads(rng: np.random.Generator, problem: RoundProblem) -> RoundProblem:
    """Return the round with up to three payloads per unit, and error queues or a limiting
    budget."""
    uplinks = tuple(_offering(rng, uplink) for uplink in problem.uplinks)
    queues = tuple(rng.choice([0.0, 0.1, rng.uniform(0, 5)], len(uplinks)).tolist())
    return replace(problem, uplinks=uplinks, error_queues=queues if rng.random() < 0.7 else ())


def _offering(rng: np.random.Generator, uplink: Uplink) -> Uplink:
    names = "float32", "int8", "int4"
    shares = 1.0, float(rng.uniform(0.2, 0.6)), float(rng.uniform(0.1, 0.2))
    errors = 0.0, float(10 ** rng.uniform(-5, -2.9)), float(10 ** rng.uniform(-3.5, -1.5))
    count = int(rng.integers(1, 4))
    payloads = tuple(
        Payload(name, name, share * uplink.model_bits, share * uplink.activation_bits, error)
        for name, share, error in zip(names, shares, errors, strict=True)
    )
    return replace(uplink, payloads=payloads[:count])


def check(problem: RoundProblem, reference: RoundProblem) -> set[str | None]:
    """Check that the answer is the best of ``reference``; return the precisions that units send."""
    allocations = best_allocations(problem, *rounds.best_of_payloads(reference))
    return {each.payload.activation for each in allocations if each.payload}


@pytest.mark.parametrize(
    ("drift", "fading", "count"),
    [
        ("gamma", "none", cases(20, 150)),
        ("paper", "none", cases(20, 60)),
        ("gamma", "rayleigh", cases(2, 8)),
        ("paper", "rayleigh", cases(1, 2)),
    ],
)
def test_the_payloads_are_as_good_as_by_enumeration(drift: str, fading: str, count: int) -> None:
    rng, sent = np.random.default_rng(0), set[str | None]()
    for _ in range(count):
        drawn = rounds.random_round(rng, drift, fading, most_units=3, most_channels=2)
        problem = with_payloads(rng, drawn)
        sent |= check(problem, problem)
    assert len(sent) == 3 or count < 20


@each_law
@pytest.mark.parametrize(("drift", "count"), [("gamma", cases(2, 12)), ("paper", 2)])
def test_fronts_have_the_best_partitions_for_all_payloads(
    drift: str, count: int, latency: str
) -> None:
    """The reference tries every partition of each cluster."""
    rng, sent = np.random.default_rng(1), set[str | None]()
    for _ in range(count):
        drawn = random_clusters(rng, drift, latency)
        drawn = Round(drawn.clusters, with_payloads(rng, drawn.problem))
        sent |= check(drawn.of_fronts(), drawn.of_all())
    assert len(sent) > 1


def test_payloads_not_offered_or_beyond_the_budget_are_refused() -> None:
    rng = np.random.default_rng(3)
    problem = with_payloads(rng, rounds.random_round(rng, "gamma", most_units=1))
    while len(problem.uplinks[0].payloads) < 3 or not problem.fronts[0]:
        problem = with_payloads(rng, rounds.random_round(rng, "gamma", most_units=1))
    problem = replace(problem, error_queues=(0.0,))
    solution = exact_allocation(problem)
    (given,) = solution.allocations
    strange = Payload("int4", "int4", 1.0, 1.0, 0.0)
    for payload in (None, strange):
        forged = replace(solution, allocations=(replace(given, payload=payload),))
        with pytest.raises(PlanViolationError, match="payload"):
            verify_round(forged, problem)
    assert given.payload is not None and given.payload.gradient_error > 0
    tight = replace(problem.options, error_budget=given.payload.gradient_error / 2)
    with pytest.raises(PlanViolationError, match="payload"):
        verify_round(solution, replace(problem, error_queues=(), options=tight))


def test_the_mean_error_of_many_rounds_is_bounded_by_its_budget() -> None:
    """The last error queue bounds how much the errors exceed the budget."""
    rng = np.random.default_rng(4)
    problem = rounds.random_round(rng, "gamma", most_units=3)
    while not all(problem.fronts) or problem.options.hard_gamma:
        problem = rounds.random_round(rng, "gamma", most_units=3)
    count = len(problem.uplinks)
    rough = Payload("int4", "int4", 1e5, 1e6, 5e-3)
    fine = Payload("float32", "float32", 1e6, 1e7, 0.0)
    uplinks = tuple(replace(up, energy_j=1e9, payloads=(fine, rough)) for up in problem.uplinks)
    problem = replace(problem, uplinks=uplinks, error_queues=(0.0,) * count)
    spent, number = np.zeros(count), 60
    for _ in range(number):
        allocations = exact_allocation(problem).allocations
        for each in allocations:
            spent[each.unit] += each.gradient_error
        problem = replace(problem, error_queues=next_error_queues(problem, allocations))
    budget = problem.options.error_budget
    assert spent.max() > 0
    assert (spent / budget - number <= np.array(problem.error_queues) + 1e-9).all()
    assert (spent / number <= 1.5 * budget).all()


@pytest.mark.parametrize("seed", [13, 17, 50, 64])
def test_payloads_that_are_too_rough_do_not_change_the_objective(seed: int) -> None:
    """Some costs are extremely large, and some pairs are infeasible."""
    rng = np.random.default_rng(seed)
    problem = rounds.random_round(rng, "gamma", most_units=5)
    least = replace(problem.options, error_budget=1e-14)
    uplinks = tuple(
        replace(up, gains=tuple((np.array(up.gains) * (rng.random(len(up.gains)) < 0.6)).tolist()))
        for up in problem.uplinks
    )
    exact = tuple(Payload("float32", "float32", *_bits(up), 0.0) for up in uplinks)
    rough = tuple(Payload("int4", "int4", *_bits(up), 5e-3) for up in uplinks)
    queues = (0.0,) * len(uplinks)
    problem = replace(problem, uplinks=uplinks, options=least, error_queues=queues)
    pairs = zip(uplinks, exact, rough, strict=True)
    offering = tuple(replace(up, payloads=tuple(payloads)) for up, *payloads in pairs)
    solution = exact_allocation(replace(problem, uplinks=offering))
    assert solution.certificate.objective == pytest.approx(
        exact_allocation(problem).certificate.objective, rel=1e-9
    )


def _bits(uplink: Uplink) -> tuple[float, float]:
    return uplink.model_bits, uplink.activation_bits
