"""A correct front passes; each planted fault is reported with its constraint and the numbers."""

import ast
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optim.verify
from collapipe.errors import PlanViolationError
from collapipe.plan import Certificate
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget
from optim.latency import batch_s, block_caps, partition_of
from optim.problem import ClusterProblem, ClusterSolution, Latency, Partition
from optim.verify import verify_cluster

LAWS: tuple[Latency, ...] = ("bound", "flow_shop", "overlap")


def certified(objective: float, lower_bound: float | None = None) -> Certificate:
    """Return a certificate; by default its lower bound is the objective."""
    bound = objective if lower_bound is None else lower_bound
    return Certificate(objective, bound, "by hand", 0.0)


def solved(front: tuple[Partition, ...], certificate: Certificate) -> ClusterSolution:
    """Return the solution whose best point is the last one."""
    return ClusterSolution(front, front[-1], certificate)


# Computed by hand: three devices, three blocks and a batch of four samples. With m = 2, two blocks
# on `a` take 2·1·2 + 1 = 5 s, and one on `b` takes 2·2 + 0.5·2 = 5 s; `c` alone takes 36 s. With
# m = 3 they would take 14.33 s, but `b` would spend 10 J of 8 J: no partition takes below 15 s.

BUDGET = EnergyBudget(8.0, AffineLaw(0.5, 1.0, 0.5, 1.0))
DEVICES = (
    DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 1.0), max_blocks=2),
    DeviceProfile("b", AffineLaw(2.0, 0.0, 0.5, 0.0), max_blocks=2, energy=BUDGET),
    DeviceProfile("c", AffineLaw(3.0, 0.0, 0.0, 0.0)),
)
PROBLEM = ClusterProblem(DEVICES, 3, 4, 4, "flow_shop")
ALONE, BOTH = Partition((0, 0, 3), 1, 36.0, 36.0), Partition((2, 1, 0), 2, 15.0, 5.0)
SOLUTION = solved((ALONE, BOTH), certified(15.0))
MODEST = replace(SOLUTION, certificate=certified(15.0, 12.0))


def test_the_verifier_shares_no_code_with_the_solvers() -> None:
    """From ``optim`` it imports only problems, requests, the micro-batches in flight, and
    itself."""
    room = Path(optim.verify.__file__).parent
    nodes = [node for file in room.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    ours = {name for name in names if name.startswith("optim")}
    assert {name for name in ours if not name.startswith("optim.verify")} == {
        "optim.problem",
        "optim.round.problem",
        "optim.planner",
        "optim.step",
    }


HAND = {"flow_shop": (15.0, 5.0), "overlap": (14.0, 4.0), "bound": (15.0, 5.0)}
"""Seconds of a batch and of its slowest stage with ``BOTH``, under each law."""


@pytest.mark.parametrize("law", LAWS)
def test_a_front_made_by_hand_passes(law: Latency) -> None:
    seconds, slowest = HAND[law]
    point = replace(BOTH, latency_s=seconds, slowest_s=slowest)
    solution = solved((ALONE, point), certified(seconds))
    verify_cluster(solution, replace(PROBLEM, latency=law))


@pytest.mark.parametrize("law", LAWS)
def test_the_head_and_the_downlink_are_stages_of_a_front(law: Latency) -> None:
    """They take 12 s and 2 s of a batch. With m = 2 these are stages of 6 s and 1 s, and the others
    take 5 s or 4 s."""
    seconds, slowest = HAND[law]
    # The sum is Σ + 7 s and the slowest stage 6 s; on `c` alone they are 36 + 14 s and 36 s.
    point = replace(BOTH, latency_s=seconds - slowest + 7 + 6, slowest_s=6.0)
    alone = replace(ALONE, latency_s=50.0)
    problem = replace(PROBLEM, latency=law, head_s=12.0, gradient_s=2.0)
    verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), problem)
    swapped = replace(problem, head_s=2.0, gradient_s=12.0)
    verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), swapped)
    for fault in (replace(problem, head_s=11.0), replace(problem, gradient_s=1.0)):
        with pytest.raises(PlanViolationError, match=r"^latency"):
            verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), fault)


# Computed by hand: one device, b = 4, L = 3. A block takes 1 s per sample and 1 s per micro-batch,
# so that a micro-batch takes 12/m + 3 s. With an uplink time a, m = 1 takes 15 + a, m = 2 takes
# 9 + a/2 + max(9, a/2), and m = 3 takes 7 + a/3 + 2·max(7, a/3); they are equal at 6 and 18.
LONE = ClusterProblem((DeviceProfile("one", AffineLaw(1.0, 1.0, 0.0, 0.0)),), 3, 4, 4, "overlap")
WHOLE, HALVES, THIRDS, FOURTHS = (
    Partition((3,), m, 12.0 + 3.0 * m, 12.0 / m + 3.0) for m in (1, 2, 3, 4)
)


def for_uplinks(*times: float) -> ClusterProblem:
    return replace(LONE, activation_s=times)


@pytest.mark.parametrize(
    ("front", "times", "objective"),
    [
        ((WHOLE,), (0.0,), 15.0),
        ((WHOLE,), (5.0,), 20.0),
        ((HALVES,), (7.0,), 21.5),
        ((WHOLE, HALVES), (2.0, 10.0), 17.0),
        ((WHOLE, THIRDS), (0.0, 20.0), 15.0),
        ((WHOLE, HALVES, THIRDS), (0.0, 12.0, 20.0), 15.0),
        ((HALVES, THIRDS), (6.0, 20.0), 21.0),
        ((THIRDS,), (21.0,), 28.0),
        ((WHOLE, HALVES, THIRDS, FOURTHS), (0.0, math.inf), 15.0),
        ((HALVES, THIRDS, FOURTHS), (17.5, math.inf), 26.75),
        ((THIRDS, FOURTHS), (18.5, math.inf), 7 + 18.5 / 3 + 14),
    ],
)
def test_a_correct_front_for_some_uplink_times_passes(
    front: tuple[Partition, ...], times: tuple[float, ...], objective: float
) -> None:
    """The objective is for the first uplink time."""
    verify_cluster(ClusterSolution(front, front[0], certified(objective)), for_uplinks(*times))


UPLINK_FAULTS: list[tuple[str, ClusterSolution, ClusterProblem]] = [
    ("front: S=1 takes 18 s and is never faster: S=1 takes 15 s",
     ClusterSolution((WHOLE, HALVES), WHOLE, certified(15.0)), for_uplinks(0.0, 5.9)),
    ("front: S=1 takes 15 s and is never faster: S=1 takes 18 s",
     ClusterSolution((HALVES, WHOLE), HALVES, certified(21.5)), for_uplinks(7.0, 20.0)),
    ("front: S=1 takes 21 s and is never faster: S=1 takes 18 s",
     ClusterSolution((WHOLE, HALVES, THIRDS), WHOLE, certified(15.0)), for_uplinks(0.0, 17.9)),
    ("front: S=1 takes 15 s and is never faster: S=1 takes 18 s",
     ClusterSolution((HALVES, WHOLE), HALVES, certified(21.5)), for_uplinks(7.0, math.inf)),
    ("front: S=1 takes 18 s and is never faster: S=1 takes 21 s",
     ClusterSolution((THIRDS, HALVES), THIRDS, certified(27.5)), for_uplinks(18.5, math.inf)),
    ("best: 22 s, another point takes 21.5 s",
     ClusterSolution((WHOLE, HALVES), WHOLE, certified(22.0)), for_uplinks(7.0)),
    ("best: 19 s, another point takes 17 s",
     ClusterSolution((WHOLE, HALVES), HALVES, certified(19.0)), for_uplinks(2.0, 10.0)),
    ("best: 26.8.* s, another point takes 26.75 s",
     ClusterSolution((HALVES, THIRDS), THIRDS, certified(26.5)), for_uplinks(17.5, math.inf)),
    ("best: blocks 3 are not in the front",
     ClusterSolution((WHOLE, HALVES), THIRDS, certified(15.0)), for_uplinks(2.0, 10.0)),
    ("objective: certified as 15, expected 17",
     ClusterSolution((WHOLE, HALVES), WHOLE, certified(15.0)), for_uplinks(2.0, 10.0)),
    ("objective: certified as 22, expected 17",
     ClusterSolution((WHOLE, HALVES), WHOLE, certified(22.0)), for_uplinks(2.0, 10.0)),
    ("lower bound: 17.1, the objective is 17",
     ClusterSolution((WHOLE, HALVES), WHOLE, certified(17.0, 17.1)), for_uplinks(2.0, 10.0)),
    ("lower bound: 22 s, but blocks 3 with m=2 take 21.5 s",
     ClusterSolution((WHOLE,), WHOLE, certified(22.0)), for_uplinks(7.0)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "solution", "problem"), UPLINK_FAULTS)
def test_each_fault_of_a_front_for_some_uplink_times_is_named(
    message: str, solution: ClusterSolution, problem: ClusterProblem
) -> None:
    with pytest.raises(PlanViolationError, match=f"^{message}"):
        verify_cluster(solution, problem)


def test_replicas_are_verified_by_their_own_rule() -> None:
    """The slowest device takes 3·(3·4/3 + 0.5) = 13.5 s. Hops add no time and no energy."""
    devices = tuple(
        replace(device, max_blocks=3, energy=EnergyBudget(5.0, BUDGET.law, scope))
        for device, scope in zip(DEVICES, ("batch", "micro_batch", "batch"), strict=True)
    )
    devices = (*devices[:2], replace(devices[2], time=AffineLaw(3.0, 0.5, 9.0, 9.0)))
    point = Partition((3, 3, 3), 1, 13.5, replicated=True)
    problem = replace(PROBLEM, devices=devices)
    verify_cluster(solved((point,), certified(13.5, 0.0)), problem)
    for faulty, message in (
        (replace(point, slowest_s=1.0), "slowest stage: 1 s for blocks .* replicas take 0 s"),
        (replace(point, blocks=(3, 2, 3)), "C1: replica on b holds 2 blocks, not L=3"),
        (replace(point, num_micro_batches=2), "C1: replicas with m=2, must be 1"),
        (replace(point, latency_s=13.0), "latency: 13 s for blocks .* replicas take 13.5 s"),
    ):
        with pytest.raises(PlanViolationError, match=message):
            verify_cluster(solved((faulty,), certified(faulty.latency_s, 0.0)), problem)
    poor = replace(devices[1], energy=EnergyBudget(4.9, BUDGET.law))
    with pytest.raises(PlanViolationError, match="C9': b spends 5 J a batch on 3 blocks"):
        verify_cluster(
            solved((point,), certified(13.5, 0.0)),
            replace(problem, devices=(devices[0], poor, devices[2])),
        )


def with_point(**changes: Any) -> ClusterSolution:
    """Return the solution with a changed last point and its true objective."""
    point = replace(BOTH, **changes)
    return solved((ALONE, point), certified(point.latency_s, 0.0))


def with_budget(limit_j: float, scope: str) -> ClusterProblem:
    """Return the problem in which device b may spend this much."""
    budget = replace(BUDGET, limit_j=limit_j, scope=scope)
    devices = (DEVICES[0], replace(DEVICES[1], energy=budget), DEVICES[2])
    return replace(PROBLEM, devices=devices)


def with_memory(limit_bytes: float) -> ClusterProblem:
    """Return the problem with this memory of `a`, whose segment takes 1 byte, a block 4, and each
    sample of a micro-batch 2 more."""
    first = replace(DEVICES[0], memory=MemoryBudget(limit_bytes, 1.0, 4.0, 2.0))
    return replace(PROBLEM, devices=(first, *DEVICES[1:]))


FREE = DeviceProfile("free", AffineLaw(0.0, 0.0, 0.0, 0.0))
CLUSTER_FAULTS: list[tuple[str, ClusterSolution, ClusterProblem]] = [
    ("front: it is empty", replace(SOLUTION, front=()), PROBLEM),
    ("C1: blocks 2, 1 are for 3 devices", with_point(blocks=(2, 1)), PROBLEM),
    ("C1: c holds -1 blocks", with_point(blocks=(2, 2, -1)), PROBLEM),
    ("C1: b holds 1.0 blocks", with_point(blocks=(2, 1.0, 0)), PROBLEM),
    ("C1: blocks 2, 0, 0 sum up to 2, not L=3", with_point(blocks=(2, 0, 0)), PROBLEM),
    ("C1: blocks 2, 2, 0 sum up to 4, not L=3", with_point(blocks=(2, 2, 0)), PROBLEM),
    ("recomputing: device 3 cannot recompute", with_point(recomputing=(3,)), PROBLEM),
    ("recomputing: device 0 cannot recompute", with_point(recomputing=(0,)), PROBLEM),
    ("C1: .* with m=0, must be 1 to 4", with_point(num_micro_batches=0), PROBLEM),
    ("C1: .* with m=5, must be 1 to 4", with_point(num_micro_batches=5), PROBLEM),
    ("C1: .* with m=1.5, must be 1 to 4", with_point(num_micro_batches=1.5), PROBLEM),
    ("C7: a holds 3 blocks, its limit is 2", with_point(blocks=(3, 0, 0)), PROBLEM),
    ("C9': b spends 8 J a batch on 1 blocks with m=2, its limit is 7.99 J", SOLUTION,
     with_budget(7.99, "batch")),
    ("C9': b spends 4 J a micro_batch on 1 blocks with m=2, its limit is 3.99 J", SOLUTION,
     with_budget(3.99, "micro_batch")),
    ("C7: a holds 2 blocks, which with m=2 take 17 bytes of 16", SOLUTION, with_memory(16.0)),
    ("latency: 14.9 s for blocks 2, 1, 0 with m=2, flow_shop take 15 s",
     with_point(latency_s=14.9), PROBLEM),
    ("latency: nan s", with_point(latency_s=math.nan), PROBLEM),
    ("latency: 15 s .* with m=4, flow_shop take 14.5 s", with_point(num_micro_batches=4),
     with_budget(12.0, "batch")),
    ("slowest stage: 4.9 s for blocks 2, 1, 0 with m=2, flow_shop take 5 s",
     with_point(slowest_s=4.9), PROBLEM),
    ("slowest stage: 5 s for blocks 2, 1, 0 with m=2, overlap take 4 s",
     with_point(latency_s=14.0), replace(PROBLEM, latency="overlap")),
    ("slowest stage: 0 s", with_point(slowest_s=0.0), PROBLEM),
    ("slowest stage: nan s", with_point(slowest_s=math.nan), PROBLEM),
    ("best: 36 s, another point takes 15 s", replace(SOLUTION, best=ALONE), PROBLEM),
    ("best: blocks 1, 2, 0 are not in", replace(SOLUTION, best=Partition((1, 2, 0), 2, 15.0)),
     PROBLEM),
    ("front: S=1 follows S=2", replace(SOLUTION, front=(BOTH, ALONE)), PROBLEM),
    ("front: S=1 takes 36 s and is never faster: S=1 takes 36 s",
     replace(SOLUTION, front=(ALONE, ALONE)), PROBLEM),
    ("front: S=3 takes 27 s and is never faster: S=2 takes 15 s",
     replace(SOLUTION, front=(BOTH, Partition((1, 1, 1), 1, 27.0, 12.0))), PROBLEM),
    ("front: S=2 takes 0 s and is never faster: S=1 takes 0 s",
     solved((Partition((3, 0), 1, 0.0), Partition((2, 1), 1, 0.0)), certified(0.0)),
     replace(PROBLEM, devices=(FREE, FREE))),
    ("objective: certified as 14, expected 15", replace(SOLUTION, certificate=certified(14.0)),
     PROBLEM),
    ("objective: certified as nan", replace(SOLUTION, certificate=certified(math.nan)), PROBLEM),
    ("lower bound: 15.1, the objective is 15",
     replace(SOLUTION, certificate=certified(15.0, 15.1)), PROBLEM),
    ("lower bound: -inf", replace(SOLUTION, certificate=certified(15.0, -math.inf)), PROBLEM),
    ("lower bound: nan", replace(SOLUTION, certificate=certified(15.0, math.nan)), PROBLEM),
]  # fmt: skip


@pytest.mark.parametrize(("message", "solution", "problem"), CLUSTER_FAULTS)
def test_each_fault_of_a_front_is_named(
    message: str, solution: ClusterSolution, problem: ClusterProblem
) -> None:
    with pytest.raises(PlanViolationError, match=f"^{message}") as caught:
        verify_cluster(solution, problem)
    assert "\n" not in str(caught.value)


def test_energy_that_equals_the_budget_passes() -> None:
    """A batch takes 8 J and a micro-batch 4 J. Rounding errors pass, too."""
    for limit_j, scope in ((8.0, "batch"), (4.0, "micro_batch"), (8.0 * (1 - 1e-12), "batch")):
        verify_cluster(MODEST, with_budget(limit_j, scope))


def test_memory_that_equals_the_limit_passes() -> None:
    """Device `a` takes 1 + 2·(4 + 2·2) = 17 bytes."""
    verify_cluster(SOLUTION, with_memory(17.0))


def test_a_lower_bound_that_ignores_available_energy_is_refused() -> None:
    """10 J allow m = 3, which is faster."""
    with pytest.raises(PlanViolationError, match=r"lower bound: 15 s, .* with m=3 take 14\.33"):
        verify_cluster(SOLUTION, with_budget(10.1, "batch"))


def test_a_rounding_error_of_a_latency_passes() -> None:
    """The relative error is 1e-12."""
    verify_cluster(with_point(latency_s=15.0 * (1 + 1e-12)), PROBLEM)


def test_the_gap_of_an_objective_of_zero_is_undefined() -> None:
    """It is defined only if the lower bound is 0, too."""
    free = replace(PROBLEM, devices=(FREE,))
    point = Partition((3,), 1, 0.0)
    verify_cluster(solved((point,), certified(0.0)), free)
    with pytest.raises(PlanViolationError, match="gap: undefined for objective 0"):
        verify_cluster(solved((point,), certified(0.0, -1.0)), free)


class WrongGap(Certificate):
    """A certificate whose gap does not match its numbers."""

    @property
    def gap(self) -> float:
        return 0.0


def test_a_wrong_gap_is_refused() -> None:
    claimed = WrongGap(15.0, 12.0, "by hand", 0.0)
    with pytest.raises(PlanViolationError, match=r"gap: 0, expected 0\.2"):
        verify_cluster(replace(SOLUTION, certificate=claimed), PROBLEM)


@pytest.mark.parametrize(
    ("point", "better"),
    [
        (Partition((2, 1, 0), 1, 19.0, 10.0), "19 s, but blocks 2, 1, 0 with m=2 take 15 s"),
        (Partition((1, 2, 0), 2, 21.0, 9.0), "21 s, but blocks 2, 1, 0 with m=2 take 15 s"),
        (Partition((2, 0, 1), 2, 17.0, 6.0), "17 s, but blocks 2, 1, 0 with m=2 take 15 s"),
        (Partition((0, 2, 1), 1, 30.0, 18.0), "30 s, but blocks 2, 0, 1 with m=1 take 21 s"),
    ],
    ids=["m", "block", "segment", "two steps"],
)
def test_a_lower_bound_above_a_neighbour_is_refused(point: Partition, better: str) -> None:
    """The answer is feasible, but its certificate wrongly says that it is optimal."""
    problem = replace(with_budget(100.0, "batch"), max_micro_batches=2)
    verify_cluster(solved((point,), certified(point.latency_s, 0.0)), problem)
    with pytest.raises(PlanViolationError, match=f"^lower bound: {better}"):
        verify_cluster(solved((point,), certified(point.latency_s)), problem)


# Random fronts by enumeration, of which one field is then corrupted.


def random_cluster(rng: np.random.Generator, law: Latency) -> ClusterProblem:
    """Draw one to three devices, up to four blocks, short hops, and caps of each kind."""
    scale = np.array([1.0, 1.0, 0.1, 0.1])
    devices = tuple(
        DeviceProfile(
            f"device-{k}",
            AffineLaw(*(rng.uniform(0.1, 1.0, 4) * scale * rng.choice([1.0, 4.0]))),
            None if rng.random() < 0.5 else int(rng.integers(1, 4)),
            None if rng.random() < 0.5 else random_budget(rng),
        )
        for k in range(rng.integers(1, 4))
    )
    low, more = (float(rng.choice([0.0, rng.uniform(0, 60)])) for _ in range(2))
    times = (low, low + more / 2, low + more) if more else (low,)
    times = (low, math.inf) if rng.random() < 0.4 else times
    head, gradient = (float(rng.choice([0.0, rng.uniform(0, 20)])) for _ in range(2))
    sizes = int(rng.integers(1, 5)), int(rng.integers(1, 17)), 4
    return ClusterProblem(devices, *sizes, law, times, head, gradient)


def random_budget(rng: np.random.Generator) -> EnergyBudget:
    """Draw a budget for about two blocks."""
    scope = "batch" if rng.random() < 0.5 else "micro_batch"
    return EnergyBudget(rng.uniform(2.0, 40.0), AffineLaw(*rng.uniform(0.1, 1.0, 4)), scope)


def enumerated(problem: ClusterProblem) -> ClusterSolution | None:
    """Return the front by brute force: the fastest with at most S segments, at all uplink times or
    at samples of a range. Return None if the caps cannot hold the model."""
    caps, points = block_caps(problem), list[Partition]()
    for blocks in itertools.product(range(problem.num_blocks + 1), repeat=len(problem.devices)):
        if sum(blocks) == problem.num_blocks:
            for m in range(1, problem.max_micro_batches + 1):
                if all(held <= cap for held, cap in zip(blocks, caps[m - 1], strict=True)):
                    points.append(partition_of(problem, blocks, m))
    if not points:
        return None
    front, times = dict[Partition, None](), problem.activation_s
    if math.isinf(times[-1]):
        times = tuple(np.linspace(times[0], times[0] + 100.0, 8).tolist())
    for most in range(1, len(problem.devices) + 1):
        few = [point for point in points if point.num_segments <= most]
        for activation_s in times if few else ():
            fastest = min(few, key=lambda point, a=activation_s: batch_s(point, a))
            if fastest.num_segments == most:
                front[fastest] = None
    best = min(front, key=lambda point: batch_s(point, times[0]))
    return ClusterSolution(tuple(front), best, certified(batch_s(best, times[0])))


def corrupted_fronts(
    solution: ClusterSolution, problem: ClusterProblem, rng: np.random.Generator
) -> Iterator[ClusterSolution]:
    """Yield answers with one change each that makes them wrong."""
    place = int(rng.integers(len(solution.front)))
    point, k = solution.front[place], int(rng.integers(len(problem.devices)))
    factor = 1 + rng.choice([-1, 1]) * 10.0 ** rng.uniform(-8, -1)
    more = tuple(held + (i == k) for i, held in enumerate(point.blocks))
    for changed in (
        replace(point, blocks=more),
        replace(point, blocks=more[:-1]),
        replace(point, num_micro_batches=problem.max_micro_batches + 1),
        replace(point, num_micro_batches=0),
        replace(point, latency_s=point.latency_s * factor),
        replace(point, slowest_s=point.slowest_s * factor),
        replace(point, replicated=len(problem.devices) > 1 or problem.num_blocks == 0),
    ):
        if changed != point:
            front = (*solution.front[:place], changed, *solution.front[place + 1 :])
            best = changed if point is solution.best else solution.best
            seconds = batch_s(best, problem.activation_s[0]) if best.num_micro_batches else 0.0
            yield ClusterSolution(front, best, certified(seconds, 0.0))
    yield replace(solution, front=(*solution.front, solution.front[-1]))
    yield replace(solution, best=replace(solution.best, over_limits=True))
    objective = solution.certificate.objective
    yield replace(solution, certificate=certified(objective * factor, 0.0))
    yield replace(solution, certificate=certified(objective, objective * (1 + abs(factor - 1))))


@pytest.mark.parametrize("law", LAWS)
@given(st.integers(0, 2**32))
def test_a_correct_front_passes_and_a_corrupted_one_does_not(law: Latency, seed: int) -> None:
    """No neighbour refutes the optimum, which is certified without a gap."""
    rng = np.random.default_rng(seed)
    problem = random_cluster(rng, law)
    solution = enumerated(problem)
    if solution is None:
        return
    verify_cluster(solution, problem)
    for spoilt in corrupted_fronts(solution, problem, rng):
        with pytest.raises(PlanViolationError):
            verify_cluster(spoilt, problem)


def test_a_bound_for_a_fixed_m_is_not_refuted_by_another_m() -> None:
    """A micro-batch of any size takes 1 s, so m = 1 would be faster than the required m = 4."""
    device = DeviceProfile("a", AffineLaw(0.0, 1.0, 0.0, 0.0))
    fixed = ClusterProblem((device,), 1, 4, 4, "overlap", min_micro_batches=4)
    verify_cluster(solved((Partition((1,), 4, 4.0, 1.0),), certified(4.0)), fixed)
