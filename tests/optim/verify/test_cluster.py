"""A right front passes; each planted fault is named by its constraint, with the numbers."""

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
    """With the objective as its own bound, where no other is given."""
    bound = objective if lower_bound is None else lower_bound
    return Certificate(objective, bound, "by hand", 0.0)


def solved(front: tuple[Partition, ...], certificate: Certificate) -> ClusterSolution:
    """The last point is the best."""
    return ClusterSolution(front, front[-1], certificate)


# By hand: a cluster of three devices, three blocks, and a batch of four samples. With m = 2, two
# blocks on `a` take 2·1·2 + 1 = 5 s, one on `b` takes 2·2 + 0.5·2 = 5 s; `c` alone takes 36 s. With
# m = 3 it were 14.33 s, but 10 J of the 8 J that `b` may spend: no partition is below 15 s.

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


def test_it_shares_no_code_with_the_solvers() -> None:
    """Of this room it imports what a problem and an answer are, what schedules keep, and itself."""
    room = Path(optim.verify.__file__).parent
    nodes = [node for file in room.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    ours = {name for name in names if name.startswith("optim")}
    assert {name for name in ours if not name.startswith("optim.verify")} == {
        "optim.problem",
        "optim.planner",
        "optim.step",
    }


HAND = {"flow_shop": (15.0, 5.0), "overlap": (14.0, 4.0), "bound": (15.0, 5.0)}
"""Of ``BOTH`` under each law: seconds of a batch, and of its slowest stage."""


@pytest.mark.parametrize("law", LAWS)
def test_a_front_made_by_hand_passes(law: Latency) -> None:
    seconds, slowest = HAND[law]
    point = replace(BOTH, latency_s=seconds, slowest_s=slowest)
    solution = solved((ALONE, point), certified(seconds))
    verify_cluster(solution, replace(PROBLEM, latency=law))


@pytest.mark.parametrize("law", LAWS)
def test_a_head_and_gradients_are_stages_of_a_front(law: Latency) -> None:
    """Of a batch 12 s and 2 s: with m = 2 6 s and 1 s beside stages of 5 s or 4 s."""
    seconds, slowest = HAND[law]
    # Σ + 7, and 6 s are the slowest stage; alone Σ is 36 + 14, and 36 s the slowest.
    point = replace(BOTH, latency_s=seconds - slowest + 7 + 6, slowest_s=6.0)
    alone = replace(ALONE, latency_s=50.0)
    problem = replace(PROBLEM, latency=law, head_s=12.0, gradient_s=2.0)
    verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), problem)
    swapped = replace(problem, head_s=2.0, gradient_s=12.0)
    verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), swapped)
    for fault in (replace(problem, head_s=11.0), replace(problem, gradient_s=1.0)):
        with pytest.raises(PlanViolationError, match=r"^latency"):
            verify_cluster(solved((alone, point), certified(point.latency_s, 0.0)), fault)


# By hand: one device, b = 4, L = 3, a block takes 1 s a sample and 1 s a micro-batch: 12/m + 3
# seconds of each. With a seconds on the uplink m = 1 takes 15 + a, m = 2 takes
# 9 + a/2 + max(9, a/2), m = 3 takes 7 + a/3 + 2·max(7, a/3); they meet at a = 6 and a = 18.
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
def test_a_front_for_some_uplinks_passes(
    front: tuple[Partition, ...], times: tuple[float, ...], objective: float
) -> None:
    """Certified for the first time."""
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


@pytest.mark.parametrize(("says", "solution", "problem"), UPLINK_FAULTS)
def test_each_fault_of_a_front_for_some_uplinks_is_named(
    says: str, solution: ClusterSolution, problem: ClusterProblem
) -> None:
    with pytest.raises(PlanViolationError, match=f"^{says}"):
        verify_cluster(solution, problem)


def test_replicas_pass_by_their_own_rule() -> None:
    """3·(3·4/3 + 0.5) = 13.5 s on the slowest device; no hop, neither in time nor in energy."""
    devices = tuple(
        replace(device, max_blocks=3, energy=EnergyBudget(5.0, BUDGET.law, scope))
        for device, scope in zip(DEVICES, ("batch", "micro_batch", "batch"), strict=True)
    )
    devices = (*devices[:2], replace(devices[2], time=AffineLaw(3.0, 0.5, 9.0, 9.0)))
    point = Partition((3, 3, 3), 1, 13.5, replicated=True)
    problem = replace(PROBLEM, devices=devices)
    verify_cluster(solved((point,), certified(13.5, 0.0)), problem)
    for faulty, says in (
        (replace(point, slowest_s=1.0), "slowest stage: 1 s for blocks .* replicas take 0 s"),
        (replace(point, blocks=(3, 2, 3)), "C1: replica on b holds 2 blocks, not L=3"),
        (replace(point, num_micro_batches=2), "C1: replicas with m=2, must be 1"),
        (replace(point, latency_s=13.0), "latency: 13 s for blocks .* replicas take 13.5 s"),
    ):
        with pytest.raises(PlanViolationError, match=says):
            verify_cluster(solved((faulty,), certified(faulty.latency_s, 0.0)), problem)
    poor = replace(devices[1], energy=EnergyBudget(4.9, BUDGET.law))
    with pytest.raises(PlanViolationError, match="C9': b spends 5 J a batch on 3 blocks"):
        verify_cluster(
            solved((point,), certified(13.5, 0.0)),
            replace(problem, devices=(devices[0], poor, devices[2])),
        )


def with_point(**changes: Any) -> ClusterSolution:
    """Another last point, certified honestly."""
    point = replace(BOTH, **changes)
    return solved((ALONE, point), certified(point.latency_s, 0.0))


def with_budget(limit_j: float, scope: str) -> ClusterProblem:
    """Device b may spend this much."""
    budget = replace(BUDGET, limit_j=limit_j, scope=scope)
    devices = (DEVICES[0], replace(DEVICES[1], energy=budget), DEVICES[2])
    return replace(PROBLEM, devices=devices)


def with_memory(limit_bytes: float) -> ClusterProblem:
    """Of `a`, whose segment takes 1 byte, a block 4, and each sample of a micro-batch 2 more."""
    first = replace(DEVICES[0], memory=MemoryBudget(limit_bytes, 1.0, 4.0, 2.0))
    return replace(PROBLEM, devices=(first, *DEVICES[1:]))


EMPTY = Partition((0, 0, 0), 1, 0.0)
FREE = DeviceProfile("free", AffineLaw(0.0, 0.0, 0.0, 0.0))
CLUSTER_FAULTS: list[tuple[str, ClusterSolution, ClusterProblem]] = [
    ("front: it is empty", replace(SOLUTION, front=()), PROBLEM),
    ("C1: blocks 2, 1 are for 3 devices", with_point(blocks=(2, 1)), PROBLEM),
    ("C1: c holds -1 blocks", with_point(blocks=(2, 2, -1)), PROBLEM),
    ("C1: b holds 1.0 blocks", with_point(blocks=(2, 1.0, 0)), PROBLEM),
    ("C1: blocks 2, 0, 0 sum up to 2, not L=3", with_point(blocks=(2, 0, 0)), PROBLEM),
    ("C1: blocks 2, 2, 0 sum up to 4, not L=3", with_point(blocks=(2, 2, 0)), PROBLEM),
    ("C2: blocks 0, 0, 0 make S=0, must be 1 to 0", solved((EMPTY,), certified(0.0)),
     replace(PROBLEM, num_blocks=0)),
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


@pytest.mark.parametrize(("says", "solution", "problem"), CLUSTER_FAULTS)
def test_each_fault_of_a_front_is_named(
    says: str, solution: ClusterSolution, problem: ClusterProblem
) -> None:
    with pytest.raises(PlanViolationError, match=f"^{says}") as caught:
        verify_cluster(solution, problem)
    assert "\n" not in str(caught.value)


def test_budgets_that_hold_exactly_are_kept() -> None:
    """8 J a batch, 4 J a micro-batch; and rounding is no fault."""
    for limit_j, scope in ((8.0, "batch"), (4.0, "micro_batch"), (8.0 * (1 - 1e-12), "batch")):
        verify_cluster(MODEST, with_budget(limit_j, scope))


def test_memory_that_holds_exactly_is_kept() -> None:
    """1 + 2·(4 + 2·2) bytes."""
    verify_cluster(SOLUTION, with_memory(17.0))


def test_energy_that_is_left_refutes_a_claim() -> None:
    """10 J allow m = 3."""
    with pytest.raises(PlanViolationError, match=r"lower bound: 15 s, .* with m=3 take 14\.33"):
        verify_cluster(SOLUTION, with_budget(10.1, "batch"))


def test_rounding_of_a_latency_is_no_fault() -> None:
    """Of a part in 10¹²."""
    verify_cluster(with_point(latency_s=15.0 * (1 + 1e-12)), PROBLEM)


def test_no_gap_is_defined_for_an_objective_of_zero() -> None:
    """Unless the bound is 0 too."""
    free = replace(PROBLEM, devices=(FREE,))
    point = Partition((3,), 1, 0.0)
    verify_cluster(solved((point,), certified(0.0)), free)
    with pytest.raises(PlanViolationError, match="gap: undefined for objective 0"):
        verify_cluster(solved((point,), certified(0.0, -1.0)), free)


class WrongGap(Certificate):
    """A certificate that claims more than its numbers."""

    @property
    def gap(self) -> float:
        return 0.0


def test_a_gap_that_is_only_claimed_is_refused() -> None:
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
def test_a_claim_that_a_neighbour_refutes(point: Partition, better: str) -> None:
    """The answer is feasible, yet not optimal as it says."""
    problem = replace(with_budget(100.0, "batch"), max_micro_batches=2)
    verify_cluster(solved((point,), certified(point.latency_s, 0.0)), problem)
    with pytest.raises(PlanViolationError, match=f"^lower bound: {better}"):
        verify_cluster(solved((point,), certified(point.latency_s)), problem)


# At random: the front by enumeration, then one field of it spoilt.


def random_cluster(rng: np.random.Generator, law: Latency) -> ClusterProblem:
    """One to three devices, up to four blocks, short hops, caps of each kind."""
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
    """Of about two blocks."""
    scope = "batch" if rng.random() < 0.5 else "micro_batch"
    return EnergyBudget(rng.uniform(2.0, 40.0), AffineLaw(*rng.uniform(0.1, 1.0, 4)), scope)


def enumerated(problem: ClusterProblem) -> ClusterSolution | None:
    """The front by brute force: who is fastest with at most S segments, at all times or at some of
    a range; None where the caps cannot hold the model."""
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


def spoilt_fronts(
    solution: ClusterSolution, problem: ClusterProblem, rng: np.random.Generator
) -> Iterator[ClusterSolution]:
    """One change each, of a kind that no answer survives."""
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
def test_a_right_front_passes_and_a_spoilt_one_does_not(law: Latency, seed: int) -> None:
    """The optimum, certified without a gap, is refuted by no neighbour."""
    rng = np.random.default_rng(seed)
    problem = random_cluster(rng, law)
    solution = enumerated(problem)
    if solution is None:
        return
    verify_cluster(solution, problem)
    for spoilt in spoilt_fronts(solution, problem, rng):
        with pytest.raises(PlanViolationError):
            verify_cluster(spoilt, problem)


def test_a_bound_for_one_number_of_micro_batches_is_not_refuted_by_another() -> None:
    """By hand: a micro-batch takes 1 s of any size, so that m = 1 were faster than the fixed 4."""
    device = DeviceProfile("a", AffineLaw(0.0, 1.0, 0.0, 0.0))
    fixed = ClusterProblem((device,), 1, 4, 4, "overlap", min_micro_batches=4)
    verify_cluster(solved((Partition((1,), 4, 4.0, 1.0),), certified(4.0)), fixed)
