"""Hops that depend on the next device: plans are the fastest, or have a valid lower bound."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import optim.sharing.exact
from collapipe.errors import ConfigError, InfeasibleRoundError, PlanViolationError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, Link, SharingLaw
from collapipe.step_law import DeviceTimes, HeldStage
from optim.latency import batch_s
from optim.partition.exact import exact_partition
from optim.problem import LATENCIES, ClusterProblem, ClusterSolver, Latency, Partition, Stage
from optim.sharing.exact import shared_partition
from optim.sharing.law import energy_j, partition_of_stages, stages_of
from optim.sharing.modes import held_in_order, with_hops
from optim.sharing.states import kinds_of
from optim.simulated_plan import as_measured
from optim.solvers import CLUSTER_SOLVERS, cluster_solver
from optim.step import step_s, works_of
from optim.verified import solve_verified, witnessed
from optim.verify.cluster import check_plan
from optim.verify.witness import witness_of
from tests.optim.sharing.instances import budgeted, drawn, linked, tight
from tests.optim.sharing.oracle import fastest_at, fastest_s
from tests.optim.uplink_times import sampled_times, solved
from tests.step_laws import law_of
from tests.step_laws import stages_of as held
from tests.thorough import cases, chosen

ROOMS = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0, "f": 1}


def two_rooms(slow: Link, names: str = "abcdef", usual: float = 0.01) -> ClusterProblem:
    """Return equal devices in two rooms, which alternate in the file's order. Each device holds two
    of the blocks, so that all are used."""
    devices = tuple(
        DeviceProfile(
            name,
            AffineLaw(0.1, 0.0, usual, 0.0),
            max_blocks=2,
            links=tuple(replace(slow, to=to) for to in names if ROOMS[to] != ROOMS[name]),
        )
        for name in names
    )
    return ClusterProblem(devices, 2 * len(names), 8, 8, "overlap", in_flight=(2,))


def solve(problem: ClusterProblem, solver: ClusterSolver = exact_partition):  # type: ignore[no-untyped-def]
    return solve_verified(problem, solver, np.random.default_rng(0))


def solve_as_fast(problem: ClusterProblem, solver: ClusterSolver) -> bool:
    """Compare the front with all plans; return False if no plan is feasible."""
    return solved(problem, solver, fastest_at(problem, sampled_times(problem))) is not None


def instance(
    draw: Callable[..., ClusterProblem], solver: ClusterSolver, *seed: int
) -> ClusterProblem:
    """Draw a problem with links; devices share stages only if the solver plans shared stages."""
    rng = np.random.default_rng(seed)
    problem = linked(draw(rng), rng)
    shares = solver is shared_partition
    devices = (replace(each, sharing=each.sharing if shares else None) for each in problem.devices)
    return replace(problem, devices=tuple(devices))


@pytest.mark.parametrize("seed", chosen(range(40), range(1)))
@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
@pytest.mark.parametrize("draw", [drawn, tight])
def test_no_plan_is_faster_than_the_solvers(
    draw: Callable[..., ClusterProblem], solver: ClusterSolver, seed: int
) -> None:
    """The oracle tries all orders, blocks, rows, modes and m, under all laws, for all uplink
    times."""
    laws = set()
    for number in range(cases(few=15, many=30)):
        problem = instance(draw, solver, seed, number)
        if solve_as_fast(problem, solver):
            laws.add(problem.latency)
    assert laws == set(LATENCIES)


@pytest.mark.parametrize(
    ("draw", "solver", "seed"),
    [
        # a hop to a device, not to the control unit, is the slowest stage
        (tight, exact_partition, (5, 215)),
        (tight, exact_partition, (5, 477)),
        # a plan is the fastest only near the uplink time at which two others are equally fast
        (drawn, exact_partition, (20, 28)),
        # a usual hop is slower than all links, and the uplink may take any time
        (tight, shared_partition, (4, 17)),
        # a device without rows cannot save the others a hop over a link
        (drawn, shared_partition, (5, 266)),
        (drawn, shared_partition, (5, 615)),
        (tight, shared_partition, (5, 50)),
    ],
)
def test_no_plan_is_faster_in_rare_cases(
    draw: Callable[..., ClusterProblem], solver: ClusterSolver, seed: tuple[int, int]
) -> None:
    assert solve_as_fast(instance(draw, solver, *seed), solver)


@pytest.mark.parametrize("seed", chosen(range(20), range(1)))
def test_each_number_of_segments_has_its_fastest_plan(seed: int) -> None:
    for number in range(30):
        problem = instance(drawn, exact_partition, seed, number)
        problem = replace(problem, activation_s=(0.0,))
        expected = [fastest_s(problem, most=most + 1) for most in range(len(problem.devices))]
        if math.isinf(expected[-1]):
            continue
        front = solve(problem).front
        for most, least_s in enumerate(expected, start=1):
            few = [each.latency_s for each in front if each.num_segments <= most]
            assert min(few, default=math.inf) == pytest.approx(least_s, rel=1e-9), (seed, number)


@pytest.mark.parametrize("most_pairs", chosen([0, 9], [9]))  # no pairs, or the pairs of two devices
@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
def test_the_bound_holds_beyond_the_limit_of_devices(
    solver: ClusterSolver, most_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without a gap is the fastest; plans are less than 10 % slower on average."""
    monkeypatch.setattr(optim.sharing.exact, "_MOST_ORDERED", most_pairs)
    proved, ratios = 0, list[float]()
    for number in range(cases(few=30, many=60)):
        problem = instance(drawn, solver, 3, number)
        if len(problem.devices) < 3 or math.isinf(least_s := fastest_s(problem)):
            continue
        certificate = (solution := solve(problem, solver)).certificate
        assert certificate.lower_bound <= least_s * (1 + 1e-9)
        best_s = batch_s(solution.best, 0.0)
        assert certificate.objective == pytest.approx(best_s) and best_s >= least_s * (1 - 1e-9)
        if certificate.gap < 1e-9:
            proved += 1
            assert best_s == pytest.approx(least_s)
        ratios.append(best_s / least_s)
    assert 0 < proved < len(ratios) and np.mean(ratios) < 1.1


@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
def test_no_bound_above_the_fastest_plan_has_a_witness(solver: ClusterSolver) -> None:
    proved = 0
    for number in range(cases(few=20, many=40)):
        problem = replace(instance(drawn, solver, 4, number), activation_s=(0.0,), in_flight=())
        if math.isfinite(least_s := fastest_s(problem)):
            shared = solver is shared_partition
            assert witness_of(problem, least_s * (1 + 1e-6), shared) is None
            proved += bool(witnessed(problem, solve(problem, solver)).certificate.witness)
    assert proved


@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
@pytest.mark.parametrize("draw", [drawn, tight])
def test_no_plan_within_energy_budgets_is_faster(
    draw: Callable[..., ClusterProblem], solver: ClusterSolver
) -> None:
    """A device spends the joules of the hop in its plan. With the joules of its most expensive hop,
    some plans would be slower or infeasible."""
    dearer = 0
    for number in (
        *range(cases(few=12, many=1500)),
        345,
    ):  # rare: the plan is feasible only over a link
        problem = instance(draw, solver, 8, number)
        problem = budgeted(problem, np.random.default_rng((9, number)))
        expected = fastest_at(problem, sampled_times(problem))
        if (solution := solved(problem, solver, expected)) is not None:
            witnessed(problem, solution)
            most = zip(problem.devices, with_hops(problem, max).devices, strict=True)
            devices = tuple(replace(each, energy=other.energy) for each, other in most)
            dearer += fastest_s(replace(problem, devices=devices)) > expected[0] * (1 + 1e-9)
    assert dearer


def pair(usual_j: float, link_j: float, allowed_j: float) -> ClusterProblem:
    """Return two devices that hold two of four blocks each; the first has an energy budget for a
    hop."""
    first, last = (problem := two_rooms(Link("", 0.5, 0.0), "ab")).devices
    law = AffineLaw(0.0, 0.0, 0.0, usual_j)
    budget = EnergyBudget(allowed_j, law, "micro_batch", (Link("b", 0.0, link_j),))
    return replace(problem, devices=(replace(first, energy=budget), last))


def test_a_device_may_afford_only_its_link() -> None:
    """Such a device cannot be the last one, which has its usual hop."""
    problem = pair(usual_j=9.0, link_j=1.0, allowed_j=2.0)
    for solver in (exact_partition, shared_partition):
        best = solve(problem, solver).best
        assert best.blocks == (2, 2) and not best.stages
        assert witness_of(problem, best.latency_s * 1.01, solver is shared_partition) is None
    assert held_in_order(problem)[0].max() == 4


@pytest.mark.parametrize("name", CLUSTER_SOLVERS)
def test_no_solver_plans_a_hop_beyond_the_energy_budget(name: str) -> None:
    """Rules that place devices without regard to links raise an error."""
    problem = pair(usual_j=1.0, link_j=9.0, allowed_j=2.0)
    if name in ("exact", "shared"):
        assert [each.devices for each in solve(problem, cluster_solver(name)).best.stages] == [
            (1,),
            (0,),
        ]
        last = replace(
            problem.devices[1],
            energy=replace(problem.devices[0].energy, links=(Link("a", 0.0, 9.0),)),
        )
        problem = replace(problem, devices=(problem.devices[0], last))
    with pytest.raises(InfeasibleRoundError) as refused:
        solve(problem, cluster_solver(name))
    assert name not in ("exact", "shared") or "hold 4 blocks in no order" in str(refused.value)


@pytest.mark.parametrize("stages", [True, False])
def test_energy_counts_the_hops_of_the_plan(stages: bool) -> None:
    """Evaluation and verification agree. The last stage has its usual hop."""
    problem, order = two_rooms(Link("", 1.0, 0.5), "ab"), (1, 0) if stages else (0, 1)
    law = AffineLaw(1.0, 0.0, 0.1, 0.0)
    spent = dict(zip(order, (4 * (2 * 2 + 7 * 2 + 3), 4 * (2 * 2 + 0.1 * 2)), strict=True))
    links = {0: Link("b", 7.0, 3.0), 1: Link("a", 7.0, 3.0)}

    def within(part: float) -> ClusterProblem:
        budgets = {k: EnergyBudget(part * spent[k], law, links=(links[k],)) for k in order}
        devices = (replace(each, energy=budgets[k]) for k, each in enumerate(problem.devices))
        return replace(problem, devices=tuple(devices))

    plan = partition_of_stages(problem, [Stage((k,), (2,), 2) for k in order], 4)
    assert energy_j(within(1.0), plan) == pytest.approx(spent)
    check_plan(plan, within(1.0))
    with pytest.raises(PlanViolationError, match="C9'"):
        check_plan(plan, within(0.99))


def test_joules_of_links_scale_with_the_sent_bits() -> None:
    energy = EnergyBudget(1.0, AffineLaw(1.0, 2.0, 3.0, 4.0), links=(Link("b", 5.0, 6.0),))
    links = (Link("b", 0.0, 7.0),)
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), energy=energy, links=links)
    device = device.taking(2.0, 0.5)
    assert device.energy and device.energy.law == AffineLaw(2.0, 4.0, 1.5, 4.0)
    assert device.energy.links == (Link("b", 2.5, 6.0),)
    over = device.before(["b"])
    assert over.time.ell == 7 and over.energy and over.energy.law == AffineLaw(2.0, 4.0, 2.5, 6.0)
    usual = replace(device, energy=replace(device.energy, links=()), links=())
    assert device.before(["c"]) == device.before([]) == usual
    assert device.before(["b", "c"]).time == replace(device.time, ell=7.0)


def test_links_to_absent_devices_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.sharing.exact, "_MOST_ORDERED", 0)
    problem = two_rooms(Link("", 0.0, 0.0))
    room = tuple(each for each in problem.devices if ROOMS[each.name] == 0)
    solution = solve(replace(problem, devices=room, num_blocks=6))
    assert solution.complete and solution.certificate.gap == 0


@pytest.mark.parametrize("latency", ["overlap", "flow_shop"])  # ``bound`` counts the slowest hop
def test_a_pipeline_changes_rooms_once(latency: Latency) -> None:
    """The file's order alternates between the rooms; it stays only with fast links."""
    slow = replace(two_rooms(Link("", 1.0, 0.5)), latency=latency)
    solution = solve(slow)
    rooms = [ROOMS[slow.devices[each.devices[0]].name] for each in solution.best.stages]
    assert sum(a != b for a, b in pairwise(rooms)) == 1 and len(rooms) == 6
    assert solution.certificate.gap == 0
    fast = replace(two_rooms(Link("", 0.01, 0.0)), latency=latency)
    assert not solve(fast).best.stages and solve(fast).certificate.gap == 0


def test_devices_with_the_same_links_are_interchangeable() -> None:
    problem = two_rooms(Link("", 1.0, 0.5))
    assert kinds_of(problem.devices) == [[0, 2, 4], [1, 3, 5]]
    first, *others = problem.devices
    one_way = replace(others[0], links=others[0].links[1:])  # no link back to ``first``
    assert kinds_of((first, one_way, *others[1:])) == [[0], [1], [2, 4], [3, 5]]
    links = (replace(first.links[0], sync_s=2.0), *first.links[1:])
    assert kinds_of((replace(first, links=links), *others)) == [[0], [1], [2, 4], [3, 5]]
    links = (replace(first.links[0], w=2.0), *first.links[1:])
    dear = replace(first, energy=EnergyBudget(1.0, first.time, links=links))
    assert kinds_of((dear, *others)) == [[0], [1], [2, 4], [3, 5]]


def test_a_shared_stage_sends_over_its_slowest_links() -> None:
    """It also sums its gradients over them. Only device ``b`` is in the other room."""
    problem = two_rooms(Link("", 1.0, 0.5, sync_s=4.0), "abc")
    law = SharingLaw(0.25)
    devices = (replace(each, sharing=law, max_blocks=None) for each in problem.devices)
    problem = replace(problem, devices=tuple(devices))
    usual = replace(problem, devices=tuple(replace(d, links=()) for d in problem.devices))
    slow_s, one_row_s = 2 * 1.0 + 0.5 - 2 * 0.01, 1.0 + 0.5 - 0.01
    for stages, more_s in (
        ([Stage((0,), (2,), 2), Stage((1,), (2,), 2), Stage((2,), (2,), 2)], 2 * slow_s),
        ([Stage((0,), (2,), 3), Stage((1, 2), (1, 1), 3)], slow_s + 3 * (4.0 - 0.25)),
        ([Stage((1, 2), (1, 1), 3), Stage((0,), (2,), 3)], one_row_s + 3 * (4.0 - 0.25)),
        ([Stage((0, 2), (1, 1), 6)], 0.0),
    ):
        own, other = (partition_of_stages(each, stages, 4) for each in (problem, usual))
        sums = [each.latency_s - 3 * each.slowest_s for each in (own, other)]
        assert sums[0] - sums[1] == pytest.approx(more_s)
        check_plan(own, problem)
        if more_s:
            with pytest.raises(PlanViolationError, match="latency"):
                check_plan(other, problem)


@pytest.mark.parametrize("stages", [True, False])
def test_a_plan_with_times_that_ignore_links_is_refused(stages: bool) -> None:
    problem = two_rooms(Link("", 1.0, 0.5), "ab")
    order = [Stage((k,), (8,), 2) for k in ((1, 0) if stages else (0, 1))]
    right = partition_of_stages(problem, order, 1)
    check_plan(right, problem)
    usual = replace(problem, devices=tuple(replace(d, links=()) for d in problem.devices))
    with pytest.raises(PlanViolationError, match="latency"):
        check_plan(partition_of_stages(usual, order, 1), problem)


@pytest.mark.parametrize("name", CLUSTER_SOLVERS)
def test_every_solver_counts_the_hops_of_its_plan(name: str) -> None:
    problem = replace(two_rooms(Link("", 1.0, 0.5), "abcd"), latency="flow_shop")
    free = tuple(replace(each, max_blocks=None) for each in problem.devices)
    problem = replace(problem, devices=free)
    best: Partition = solve(problem, cluster_solver(name)).best
    if not best.replicated:
        again = partition_of_stages(problem, stages_of(problem, best), best.num_micro_batches)
        assert best.latency_s == pytest.approx(again.latency_s)


def test_a_simulated_step_sends_over_the_links_of_its_order() -> None:
    """A device sends activations to the next device, and gradients to the previous one."""
    devices = {each.name: each for each in two_rooms(Link("", 1.0, 0.5), "abc").devices}
    law = law_of("abc", m=4, send_s=0.004, apart=True)
    works = works_of(law, held({"b": 2, "a": 2, "c": 2}), devices, 8)
    sent = [(each.send_s, each.back_s) for work in works for each in work.devices]
    slow_s, usual_s = 0.004 * (2 * 1.0 + 0.5) / (2 * 0.01), 0.004
    assert sent == [
        pytest.approx(each) for each in ((slow_s, usual_s), (usual_s, slow_s), (usual_s, usual_s))
    ]
    twice, once = (
        step_s(law, works_of(law, held(dict.fromkeys(order, 2)), devices, 8), "one_f_one_b")
        for order in ("abc", "bac")
    )
    assert twice > once


def test_a_fast_link_makes_a_shared_stage_worthwhile() -> None:
    problem = two_rooms(Link("", 0.01, 0.0, sync_s=0.0), "ab")
    free = (replace(each, sharing=SharingLaw(100.0), max_blocks=None) for each in problem.devices)
    problem = replace(problem, devices=tuple(free), latency="flow_shop")
    best = solve(problem, shared_partition).best
    assert best.shares and best.latency_s == pytest.approx(fastest_s(problem))


def test_a_simulated_shared_stage_sends_over_its_slowest_link() -> None:
    """Only links to devices with common rows count. ``b`` and ``d`` are in the other room."""
    problem = two_rooms(Link("", 1.0, 0.5, sync_s=4.0), "abcd")
    devices = {each.name: replace(each, sharing=SharingLaw(0.25)) for each in problem.devices}
    law = replace(law_of("abcd", m=4, send_s=0.02, apart=True), sync_slowness=1.0)
    stages = HeldStage(("a", "c"), 2, (1, 1)), HeldStage(("d", "b"), 2, (1, 1))
    first, last = works_of(law, stages, devices, 8)
    slow = [[each.send_s > 0.02 for each in work.devices] for work in (first, last)]
    back = [[(each.back_s or 0.0) > 0.02 for each in work.devices] for work in (first, last)]
    assert slow == [[True, True], [False, False]] and back == [[False, False], [True, True]]
    stages = HeldStage(("a", "c"), 2, (1, 1)), HeldStage(("e", "b"), 2, (1, 1))
    devices["e"] = replace(devices["a"], name="e")
    first, _ = works_of(law, stages, devices, 8)
    assert [each.send_s > 0.02 for each in first.devices] == [False, True]
    (whole,) = works_of(law, [HeldStage(("a", "b"), 4, (1, 1))], devices, 8)
    assert whole.sync_s == 2 * (1 / 2) * 4 * 4.0


@pytest.mark.parametrize(
    ("send_s", "w", "link"),
    [(0.02, 0.01, Link("b", 1.0, 0.52)), (0.005, 0.005, Link("b", 0.5, 0.25))],
    ids=["slower", "faster"],
)
def test_measured_hops_change_the_times_of_links(send_s: float, w: float, link: Link) -> None:
    """The inventory describes 0.02 s there and back. If the measured hop is slower, links take as
    many seconds more. If it is faster, links are faster by the same ratio."""
    problem = two_rooms(Link("", 1.0, 0.5), "ab")
    law = law_of("ab", m=4, send_s=send_s, apart=True, stages=held({"a": 2, "b": 2}))
    a = as_measured(problem, law).devices[0]
    assert (a.time.w, *a.links) == (pytest.approx(w), link)
    assert a.time.hop(2) == pytest.approx(2 * send_s)
    free = replace(
        problem,
        devices=tuple(
            replace(each, time=AffineLaw(0.1, 0.0, 0.0, 0.0)) for each in problem.devices
        ),
    )
    a = as_measured(free, replace(law, devices={"a": DeviceTimes(1 / 3, send_s, "a")})).devices[0]
    assert a.time.hop(2) == 2 * send_s


@pytest.mark.parametrize("links", [(Link("a", 1.0, 0.0),), (Link("b", 1.0, 0.0),) * 2])
def test_impossible_links_are_refused(links: tuple[Link, ...]) -> None:
    with pytest.raises(ConfigError, match="at most one link"):
        DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), links=links)
    with pytest.raises(ConfigError, match="ell"):
        Link("b", 0.0, -1.0)
