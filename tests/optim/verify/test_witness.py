"""A witness proves the bound of an exact plan, and no witness proves a bound above the best
plan."""

import math
from dataclasses import replace

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError, PlanViolationError
from collapipe.plan import Certificate, Witness
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget, SharingLaw
from optim.latency import batch_s
from optim.library import plan_cluster
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem, Latency
from optim.sharing.exact import shared_partition
from optim.verified import solve_verified, witnessed
from optim.verify.limits import possible_rows
from optim.verify.witness import check_witness, is_small, witness_of
from tests.optim.partition.test_exact import LAWS, small
from tests.optim.partition_references import by_enumeration
from tests.optim.sharing.instances import drawn as in_groups
from tests.optim.sharing.instances import lopsided
from tests.optim.sharing.oracle import fastest_at, fastest_s, fits
from tests.optim.test_recomputing import drawn
from tests.thorough import seeds

MORE = 1 + 1e-6


def certified(bound: float, witness: Witness) -> Certificate:
    return Certificate(bound, bound, "by hand", 0.0, witness)


def arbitrary(rng: np.random.Generator, problem: ClusterProblem, most: float) -> Witness:
    """Return random thresholds for each m."""
    counts = rng.integers(0, 6, problem.max_micro_batches + 1 - problem.min_micro_batches)
    return tuple(
        tuple(sorted(set(rng.uniform(0, most, count).tolist()) - {0.0})) for count in counts
    )


def instances(rng: np.random.Generator, latency: Latency) -> ClusterProblem:
    """Draw small clusters, some with stages after the encoder and a range of m."""
    problem = small(rng, latency)
    if rng.random() < 0.5:
        head_s, gradient_s, sent_s = (float(each) for each in rng.uniform(0, 9, 3))
        times = {"head_s": head_s, "gradient_s": gradient_s, "activation_s": (sent_s,)}
        problem = replace(problem, **times)
    least = int(rng.integers(1, problem.max_micro_batches + 1))
    return replace(problem, min_micro_batches=least)


@pytest.mark.parametrize("latency", LAWS)
@pytest.mark.parametrize("seed", seeds(2, 60))
def test_a_witness_proves_the_optimum_and_no_higher_bound(seed: int, latency: Latency) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(8):
        problem = instances(rng, latency)
        best_s = float(by_enumeration(problem, problem.activation_s[0])[-1])
        if math.isinf(best_s):
            continue
        witness = witness_of(problem, best_s)
        assert witness is not None
        check_witness(certified(best_s, witness), problem)
        assert best_s == 0 or witness_of(problem, best_s * MORE) is None
        for any_witness in (witness, *(arbitrary(rng, problem, best_s) for _ in range(5))):
            if best_s:
                with pytest.raises(PlanViolationError, match=r"^lower bound: "):
                    check_witness(certified(best_s * MORE, any_witness), problem)


@pytest.mark.parametrize("seed", seeds(3, 60))
def test_a_witness_of_shared_stages_proves_the_optimum_and_not_more(seed: int) -> None:
    rng, proved = np.random.default_rng(seed), 0
    while proved < 8:
        own = lopsided(rng) if proved % 2 else in_groups(rng, most_devices=3, most_blocks=4)
        problem = replace(own, in_flight=())
        (best_s,) = fastest_at(problem, problem.activation_s[:1])
        if math.isinf(best_s):
            continue
        witness = witness_of(problem, best_s, shared=True)
        assert witness is not None
        certificate = replace(certified(best_s, witness), solver="shared")
        check_witness(certificate, problem)
        assert witness_of(problem, best_s * MORE, shared=True) is None
        with pytest.raises(PlanViolationError, match=r"^lower bound: "):
            check_witness(replace(certificate, lower_bound=best_s * MORE), problem)
        proved += 1


@pytest.mark.parametrize("seed", seeds(2, 20))
def test_witnesses_hold_for_all_places_and_modes(seed: int) -> None:
    """If places or recomputing matter, a witness may prove less than the optimum and is then
    omitted."""
    rng, proved, left_out = np.random.default_rng(seed), 0, 0
    while min(proved, left_out) < 2:
        problem = replace(drawn(rng), activation_s=(0.0,))
        try:
            solution = solve_verified(problem, exact_partition, rng)
        except InfeasibleRoundError:
            continue
        witness = witnessed(problem, solution).certificate.witness
        proved, left_out = proved + bool(witness), left_out + (not witness)
        assert solution.certificate.gap == 0
        assert witness_of(problem, solution.best.latency_s * MORE) is None


DEVICES = (
    DeviceProfile("jetson", AffineLaw(0.02, 0.01, 0.0, 0.05), max_blocks=8),
    DeviceProfile("pi", AffineLaw(0.08, 0.01, 0.0, 0.05), max_blocks=6),
)
PROBLEM = ClusterProblem(DEVICES, 12, 16, 16, "overlap")


def test_a_bound_that_is_too_high_is_refused() -> None:
    solution = exact_partition(PROBLEM)
    wrong = replace(solution.certificate, lower_bound=solution.best.latency_s * MORE)
    with pytest.raises(PlanViolationError, match=r"^lower bound: .* s is not proved; "):
        witnessed(PROBLEM, replace(solution, certificate=wrong))


def test_a_planned_cluster_has_thresholds_for_each_m() -> None:
    certificate = plan_cluster(DEVICES, num_blocks=12, batch_size=16).certificate
    assert len(certificate.witness) == 16
    check_witness(certificate, PROBLEM)
    assert (
        plan_cluster(DEVICES, num_blocks=12, batch_size=16, solver="gpipe").certificate.witness
        == ()
    )


def test_large_problems_have_no_witness() -> None:
    """Finding it would take longer than planning."""
    own = tuple(
        replace(DEVICES[0], name=f"box-{k}", max_blocks=2, sharing=SharingLaw(0.01))
        for k in range(7)
    )
    problem = ClusterProblem(own, 12, 2, 2, "overlap")
    assert len(witnessed(problem, shared_partition(problem)).certificate.witness) == 2
    assert is_small(problem, shared=True)
    assert not is_small(replace(problem, max_micro_batches=128), shared=True)
    assert is_small(replace(problem, max_micro_batches=1024), shared=False)


def test_laws_may_have_whole_numbers() -> None:
    law = AffineLaw(1, 0, 1, 0)
    own = tuple(DeviceProfile(f"box-{k}", law, sharing=SharingLaw(0)) for k in range(2))
    assert shared_partition(ClusterProblem(own, 2, 4, 4, "overlap")).best.latency_s > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (((),) * 15, "15 lists of thresholds, expected one for each m"),
        (((),) * 15 + ((2.0, 1.0),), "the thresholds for m=16 do not ascend"),
        (((0.0,),) + ((),) * 15, "the thresholds for m=1 do not ascend"),
        (((math.nan,),) + ((),) * 15, "the thresholds for m=1 do not ascend"),
        (((math.inf,),) + ((),) * 15, "the thresholds for m=1 do not ascend"),
    ],
)
def test_missing_or_unordered_thresholds_are_refused(changed: Witness, message: str) -> None:
    with pytest.raises(PlanViolationError, match=f"^witness: {message}; "):
        check_witness(certified(1e-9, changed), PROBLEM)


def test_stages_that_take_no_time_are_counted() -> None:
    """A batch takes only the head's 6 s."""
    free = DeviceProfile("free", AffineLaw(0.0, 0.0, 0.0, 0.0))
    problem = ClusterProblem((free, *DEVICES), 12, 16, 2, "overlap", head_s=6.0)
    assert exact_partition(problem).best.latency_s == 6.0
    check_witness(certified(6.0, ((), ())), problem)
    with pytest.raises(PlanViolationError, match=r"^lower bound: 6.1 s, .* of 0 to inf s; "):
        check_witness(certified(6.1, ((), ())), problem)


@pytest.mark.parametrize("latency", LAWS)
def test_a_stage_that_takes_no_time_does_not_hide_the_slowest(latency: Latency) -> None:
    free = DeviceProfile("free", AffineLaw(0.0, 0.0, 0.0, 0.0), max_blocks=2)
    problem = ClusterProblem((free, *DEVICES), 3, 16, 16, latency)
    assert witnessed(problem, exact_partition(problem)).certificate.witness


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_equally_fast_devices_the_one_with_the_least_pace_gets_a_row(
    order: tuple[int, int],
) -> None:
    """For each row one device computes for 1 s and sends for 1 s, and the other computes for 2 s.
    With two rows and one row, their stage takes 4 s, and 2 s between micro-batches."""
    both = (
        DeviceProfile("sends", AffineLaw(1.0, 0.0, 1.0, 0.0), sharing=SharingLaw(0.0)),
        DeviceProfile("computes", AffineLaw(2.0, 0.0, 0.0, 0.0), sharing=SharingLaw(0.0)),
    )
    own = tuple(both[k] for k in order)
    problem = ClusterProblem(own, 1, 12, 4, "overlap", min_micro_batches=4)
    solution = witnessed(problem, shared_partition(problem))
    assert solution.best.latency_s == 4 + 3 * 2
    assert solution.certificate.witness


def test_each_device_of_a_shared_stage_has_a_row() -> None:
    """The last row does not go to the fastest device, because its pace would grow."""
    three = DeviceProfile("box", AffineLaw(0.5, 0.6, 0.9, 0.0), sharing=SharingLaw(0.1))
    fast = DeviceProfile("fast", AffineLaw(0.9, 0.0, 0.0, 0.0), sharing=SharingLaw(0.0))
    own = (*(replace(three, name=f"box-{k}") for k in range(3)), fast)
    problem = ClusterProblem(own, 1, 16, 4, "overlap", min_micro_batches=4)
    solution = witnessed(problem, shared_partition(problem))
    assert solution.best.stages[0].rows == (1, 1, 1, 1)
    assert solution.best.latency_s == pytest.approx(fastest_s(problem))
    assert solution.certificate.witness
    assert witness_of(problem, solution.best.latency_s * MORE, shared=True) is None


def test_rows_of_a_shared_stage_are_possible_if_they_fit() -> None:
    refused = 0
    for seed in range(60):
        problem = in_groups(np.random.default_rng(seed))
        for device in (each for each in problem.devices if each.sharing):
            for m in range(problem.min_micro_batches, problem.max_micro_batches + 1):
                can = possible_rows(problem, device, m, members=3)
                for (held, row), found in np.ndenumerate(can):
                    assert found == fits(problem, device, held + 1, row + 1, m, 3, place=1)
                refused += int((~can).sum())
    assert refused > 100


def test_a_witness_uses_the_memory_of_the_last_stage() -> None:
    """The device holds all blocks as the last stage, but only one block as the first of two."""
    memory = MemoryBudget(8.0, 0.0, 5.0, 0.0, batch_block_bytes=4.0)
    fast = DeviceProfile("fast", AffineLaw(0.1, 0.0, 0.0, 0.1), memory=memory)
    slow = DeviceProfile("slow", AffineLaw(9.0, 0.0, 0.0, 0.1))
    problem = ClusterProblem(
        (fast, slow), 4, 4, 4, "overlap", min_micro_batches=4, in_flight=(1, 4)
    )
    solution = witnessed(problem, solve_verified(problem, exact_partition, np.random.default_rng()))
    assert solution.best.blocks == (4, 0)
    assert solution.certificate.witness
    assert witness_of(problem, solution.best.latency_s * MORE) is None


THIRD = 1 / 3 * 1e9


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("blocks", range(1, 16))
def test_solvers_and_witnesses_round_limits_alike(blocks: int, shared: bool) -> None:
    """Otherwise a correct plan would be refused."""
    memory = MemoryBudget(THIRD / 7 + blocks * (THIRD + 0.2), THIRD / 7, THIRD, 0.1)
    energy = EnergyBudget(1e6 + blocks * 0.1, AffineLaw(0.1 / 2, 0.0, 0.0, 1e6), "micro_batch")
    sharing = SharingLaw(0.01, memory=memory)
    own = tuple(
        replace(each, max_blocks=None, memory=memory, energy=energy, sharing=sharing)
        for each in DEVICES
    )
    slow = DeviceProfile("slow", AffineLaw(2.0, 1.0, 0.0, 0.05))
    problem = ClusterProblem((*own, slow), 16, 4, 2, "overlap", min_micro_batches=2)
    solution = (shared_partition if shared else exact_partition)(problem)
    assert witnessed(problem, solution).certificate.witness
    assert exact_partition(problem).best.blocks[0] == blocks


def test_a_stopped_search_has_a_witness_of_its_lower_bound() -> None:
    solution = exact_partition(PROBLEM, max_nodes=0)
    assert witnessed(PROBLEM, solution).certificate.witness
    assert batch_s(solution.best, 0.0) >= solution.certificate.lower_bound
