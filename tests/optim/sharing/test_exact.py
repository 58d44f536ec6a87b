"""Plans with shared stages are the fastest, and their lower bounds are valid."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product

import numpy as np
import pytest

from collapipe.errors import InfeasibleRoundError, PlanViolationError
from collapipe.row_shares import row_ends
from collapipe.state import (
    AffineLaw,
    DeviceProfile,
    EnergyBudget,
    EnergyScope,
    MemoryBudget,
    SharingLaw,
)
from optim.jobs import Job, Worker, simulate
from optim.partition.exact import exact_partition
from optim.problem import (
    LATENCIES,
    ClusterProblem,
    ClusterSolution,
    ClusterSolver,
    Latency,
    Partition,
    Stage,
)
from optim.sharing.baselines import adaptis, asteroid
from optim.sharing.bounds import stage_bounds
from optim.sharing.caps import Caps, caps_by_place
from optim.sharing.costs import Tables
from optim.sharing.exact import MOST_PAIRS, placed_partition, shared_partition
from optim.sharing.law import (
    energy_j,
    partition_of_stages,
    row_caps,
    stage_of,
    stage_pace,
    stage_times,
    stages_of,
)
from optim.sharing.modes import fits as fits_at
from optim.sharing.modes import relaxed
from optim.sharing.states import kinds_of, num_pairs, ordered_states, states_of
from optim.step import in_flight
from optim.timeline import timeline
from optim.verified import solve_verified
from optim.verify import verify_cluster
from optim.verify.cluster import check_plan
from pipeline import schedule
from tests.optim.sharing.instances import drawn, linked, lopsided, slow_to_start, tight, timeless
from tests.optim.sharing.oracle import fastest_at, fastest_s, fits, shares, times
from tests.optim.uplink_times import sampled_times, solved
from tests.thorough import cases, chosen


@pytest.mark.parametrize("seed", chosen(range(60), range(1)))
@pytest.mark.parametrize("draw", [drawn, tight, lopsided, slow_to_start])
def test_no_plan_is_faster_than_the_solvers(draw: Callable[..., ClusterProblem], seed: int) -> None:
    """The oracle tries all rows, orders and modes, for all requested uplink times."""
    ordered = 0
    for number in range(60 if draw is tight else 25):
        problem = draw(np.random.default_rng((seed, number)))
        solution = solved(problem, shared_partition, fastest_at(problem, sampled_times(problem)))
        front = solution.front if solution else ()
        orders = [[each.devices for each in point.stages] for point in front]
        ordered += any(order != sorted(order) for order in orders)
    assert draw is not tight or ordered


@pytest.mark.parametrize("scope", ["batch", "micro_batch"])
def test_adding_gradients_takes_energy(scope: EnergyScope) -> None:
    """A budget per batch counts it, and a budget per micro-batch does not."""
    law, m, blocks = AffineLaw(1.0, 0.0, 0.1, 0.0), 4, 3
    adding_j = 2 * (1 / 2) * blocks * 5.0
    spent_j = m * (blocks * 1.0 + 0.1) + adding_j

    def limited(part: float) -> ClusterProblem:
        limit_j = part * (spent_j if scope == "batch" else (spent_j - adding_j) / m)
        budget = EnergyBudget(limit_j, law, scope, sync_j=5.0)
        devices = (DeviceProfile(name, law, 2, budget, sharing=SharingLaw(0.0)) for name in "ab")
        return ClusterProblem(tuple(devices), blocks, 8, m, "overlap", min_micro_batches=m)

    plan = partition_of_stages(limited(1.0), [Stage((0, 1), (1, 1), blocks)], m)
    assert energy_j(limited(1.0), plan) == pytest.approx({0: spent_j, 1: spent_j})
    check_plan(plan, limited(1.0))
    rng = np.random.default_rng(0)
    assert solve_verified(limited(1.0), shared_partition, rng).best.stages == plan.stages
    with pytest.raises(PlanViolationError, match="C9'"):
        check_plan(plan, limited(0.99))
    if scope == "batch":
        assert solve_verified(limited(0.99), shared_partition, rng).best.num_segments == 2


def test_no_plan_of_five_devices_is_faster() -> None:
    """The model has up to eight blocks."""
    larger = 0
    for number in range(cases(few=30, many=400)):
        problem = drawn(np.random.default_rng((5, number)), most_devices=5, most_blocks=8)
        solved(problem, shared_partition, fastest_at(problem, sampled_times(problem)))
        larger += len(problem.devices) == 5 and problem.num_blocks > 5
    assert larger


@pytest.mark.parametrize("seed", chosen(range(20), range(1)))
def test_no_pipeline_in_another_order_is_faster(seed: int) -> None:
    """This holds for each number of segments."""
    placed = 0
    for number in range(40):
        problem = tight(np.random.default_rng((seed, number)))
        problem = replace(problem, activation_s=problem.activation_s[:1])
        alone = tuple(replace(each, sharing=None) for each in problem.devices)
        expected = [
            fastest_s(replace(problem, devices=alone), most=most + 1)
            for most in range(len(problem.devices))
        ]
        if math.isinf(expected[-1]):
            with pytest.raises(InfeasibleRoundError):
                solve_verified(problem, exact_partition, np.random.default_rng(0))
            continue
        solution = solve_verified(problem, exact_partition, np.random.default_rng(0))
        for most, least_s in enumerate(expected, start=1):
            few = [each.latency_s for each in solution.front if each.num_segments <= most]
            assert min(few, default=math.inf) == pytest.approx(least_s, rel=1e-9), (seed, number)
        assert solution.certificate.gap == 0 and solution.complete
        placed += any(each.stages for each in solution.front)
    assert placed


def test_costs_include_recomputing_only_if_memory_requires_it() -> None:
    """Checked at every place, for every set of devices."""
    recomputing = 0
    for number in range(60):
        problem = replace(tight(np.random.default_rng(number)), latency="flow_shop")
        kinds, m = kinds_of(problem.devices), problem.max_micro_batches
        kind_of = {k: kind for kind, own in enumerate(kinds) for k in own}
        states, caps = states_of(tuple(map(len, kinds))), caps_by_place([problem], kinds)
        every = np.arange(1, problem.num_blocks + 1)
        tables = Tables.of(problem, states, [problem], kinds, caps)
        pace = tables.costs(np.array([m]), every).pace[0, :, 0]
        for place, group, held in np.argwhere(np.isfinite(pace) & (pace > 0)).tolist():
            members = zip(kinds, states.counts[group].tolist(), strict=True)
            devices = [k for own, n in members for k in own[:n]]
            own = [caps[place].rows[0, kind_of[k]] for k in devices]
            stage = stage_of(problem, devices, held + 1, m, own)
            if len(stage.devices) < len(devices):
                continue
            must = [k for k in devices if not fits_at(problem, stage, k, m, place + 1, False)]
            expected = stage_pace(problem.in_modes(must), stage, m)
            assert pace[place, group, held] == pytest.approx(expected)
            recomputing += len(devices) > 1 and bool(must)
    assert recomputing


def test_costs_of_several_m_equal_the_costs_of_each_m_alone() -> None:
    """Several m with equal rows and limits are computed only once. Each m has its own threshold."""
    same = 0
    for number in range(40):
        rng = np.random.default_rng((7, number))
        problem = replace(lopsided(rng), max_micro_batches=8, batch_size=10)
        kinds, every = kinds_of(problem.devices), np.arange(1, problem.num_blocks + 1)
        states = states_of(tuple(map(len, kinds)))
        tables = Tables.of(problem, states, [problem], kinds, [Caps.of([problem], kinds)])
        counts, free = np.arange(1, 9), tables.costs(np.arange(1, 9), every)
        finite = free.pace[np.isfinite(free.pace)]
        thresholds = rng.choice(finite, 8) if len(finite) else np.zeros(8)
        found = tables.costs(counts, every, thresholds)
        for place in range(8):
            alone = tables.costs(counts[place : place + 1], every, float(thresholds[place]))
            for name in ("once", "pace", "least"):
                own, expected = getattr(found, name)[place], getattr(alone, name)[0]
                np.testing.assert_array_equal(own, expected)
        same += len({*tables.rows.tolist()}) < 8
    assert same


@pytest.mark.parametrize("draw", [drawn, tight, lambda rng: linked(drawn(rng), rng)])
def test_the_cost_of_a_stage_is_never_below_its_bound(
    draw: Callable[[np.random.Generator], ClusterProblem],
) -> None:
    """The cost does not depend on which other stages are requested."""
    near = 0
    for number in range(cases(few=25, many=600)):
        rng = np.random.default_rng((8, number))
        problem = draw(rng)
        kinds, every = kinds_of(problem.devices), np.arange(1, problem.num_blocks + 1)
        states, following = ordered_states(problem, kinds)
        tables = Tables.of(problem, states, following, kinds, caps_by_place(following, kinds))
        bounds, first = stage_bounds(relaxed(problem), shares=False), [own[0] for own in kinds]
        counts = np.arange(1, problem.max_micro_batches + 1)
        least = tables.least(counts, every, bounds.rates[:, first], bounds.paces[:, first])
        costs = tables.costs(counts, every)
        shared = states.counts.sum(axis=1) > 1
        within = tables.costs(counts, every, float(rng.random() * bounds.longest.max()))
        for own, name in product((costs, within), ("once", "pace")):
            bound, cost = getattr(least, name), getattr(own, name)
            assert (bound <= cost * (1 + 1e-9)).all(), number
            near += np.isclose(bound, cost, rtol=0.1)[..., shared, :].sum()
        wanted = rng.random((len(counts), *costs.pace.shape[3:])) < 0.3
        some = tables.costs(counts, every, wanted=wanted)
        row, group, held = wanted.nonzero()
        for name in ("once", "pace", "least"):
            found, expected = getattr(some, name), getattr(costs, name)
            own = found[row, :, :, group, held], expected[row, :, :, group, held]
            np.testing.assert_array_equal(*own)
            assert (np.isinf(found) | (found == expected)).all()
    assert near


def test_shared_partition_alone_ignores_links_and_recomputing() -> None:
    planned = 0
    for seed in range(cases(few=100, many=200)):
        rng = np.random.default_rng((9, seed))
        problem, fronts = tight(rng), list[object]()
        problem = linked(problem, rng) if seed % 2 else problem
        usual = tuple(each.before(()).in_mode(False) for each in problem.devices)
        for own in (replace(problem, devices=usual), problem):
            with suppress(InfeasibleRoundError):
                fronts.append(shared_partition(own).front)
        assert fronts[:1] == fronts[1:], seed
        planned += bool(fronts)
    assert planned > 10


def test_within_a_threshold_no_rows_take_less_time() -> None:
    """Checked for each set of devices; some devices may have no rows. No pace is below its lower
    bound."""
    moved = 0
    for number in range(cases(few=100, many=1000)):
        rng = np.random.default_rng((6, number))
        problem = lopsided(rng)
        synced = ((each, each.sharing) for each in problem.devices)
        devices = tuple(replace(d, sharing=law and replace(law, sync_s=0.0)) for d, law in synced)
        problem = replace(problem, devices=devices, in_flight=())
        m = int(rng.integers(1, problem.max_micro_batches + 1))
        rows, kinds = math.ceil(problem.batch_size / m), kinds_of(devices)
        states = states_of(tuple(map(len, kinds)))
        every = np.arange(1, problem.num_blocks + 1)
        tables = Tables.of(problem, states, [problem], kinds, [Caps.of([problem], kinds)])
        own = np.array([m]), every
        sizes, free = states.counts.sum(axis=1), tables.costs(*own).of(0)
        shared = np.flatnonzero((sizes > 1) & (sizes <= rows))
        paces = free.pace[0, 0, shared].ravel()
        threshold = float(rng.uniform(0.7, 1) * rng.choice(paces)) if len(paces) else 0.0
        within = tables.costs(*own, threshold).of(0)
        for group, blocks in product(shared.tolist(), every.tolist()):
            held = zip(kinds, states.counts[group].tolist(), strict=True)
            members = [devices[k] for own, n in held for k in own[:n]]
            splits = [
                times(problem, own, split, blocks)
                for size in range(2, len(members) + 1)
                for own in combinations(members, size)
                for split in shares(rows, size)
                if all(
                    fits(problem, device, blocks, y, m, len(members))
                    for device, y in zip(own, split, strict=True)
                )
            ]
            place = 0, 0, group, blocks - 1
            least_s = min((once for pace, once in splits if pace <= threshold), default=math.inf)
            assert within.once[place] == pytest.approx(least_s), number
            assert free.least[place] <= min(splits, default=(math.inf,))[0] * (1 + 1e-12)
            moved += free.once[place] < within.once[place] < math.inf
    assert moved > 10


def test_row_caps_are_the_most_rows_that_fit() -> None:
    """Checked for each number of devices in the stage; memory or energy is often scarce."""
    bound = 0
    for seed in range(150):
        problem = drawn(np.random.default_rng(seed))
        for device in (each for each in problem.devices if each.sharing):
            for (others, row, held), cap in np.ndenumerate(row_caps(problem, device)):
                m, blocks, members = row + 1, held + 1, others + 2
                most = math.ceil(problem.batch_size / m) - 1  # another device has a row
                rows = range(1, most + 1)
                fitting = [y for y in rows if fits(problem, device, blocks, y, m, members)]
                if m >= problem.min_micro_batches:
                    assert cap == max(fitting, default=0), (seed, device.name)
                    bound += len(fitting) < len(rows)
    assert bound > 100


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_a_device_keeps_at_most_as_many_rows_as_its_memory_was_counted_for(name: str) -> None:
    """A row takes a byte. Of smaller micro-batches a device may have more than its part."""
    law, filled = AffineLaw(1.0, 0.0, 0.0, 0.0), 0
    for b, limit in product((5, 8, 11), range(1, 11)):
        memory = MemoryBudget(limit, 0.0, b, 0.0, batch_block_bytes=b)
        device = DeviceProfile("a", law, sharing=SharingLaw(0.0, memory=memory))
        problem = ClusterProblem((device,), 1, b, b, "overlap", in_flight=in_flight(name, 1))
        for m, own in enumerate(row_caps(problem, device)[0, :, 0].tolist(), start=1):
            sizes = [len(each) for each in np.array_split(np.arange(b), m)]
            for planned in ((own, sizes[0] - own), (sizes[0] - own, own)):
                ends = [(0, *row_ends(planned, size)) for size in sizes]
                first = planned[0] != own
                rows = [each[first + 1] - each[first] for each in ends]
                actions = schedule.build(name, 1, m)[0]
                signs = (rows[e.micro_batch] * (1 if e.kind == "F" else -1) for e in actions)
                most = max(accumulate(signs))
                assert most <= limit, (b, m, planned)
                filled += most == limit
    assert filled > 20


def test_a_device_without_a_law_of_sharing_keeps_its_limit_of_blocks() -> None:
    """In VanillaFL all devices share the batch, also those whose rate is not known."""
    law = AffineLaw(1.0, 0.0, 0.0, 0.0)
    devices = tuple(DeviceProfile(name, law).at_most(3) for name in "ab")
    problem = ClusterProblem(devices, 4, 4, 1, "overlap").sharing()
    assert (row_caps(problem, problem.devices[0])[0, 0] > 0).tolist() == [True, True, True, False]


def test_under_law_bound_more_stages_may_be_faster() -> None:
    """A plan with more stages, less sync and the same pace is faster at a lower threshold."""

    def device(
        name: str, law: tuple[float, ...], alone: int, sync_s: float, most: int
    ) -> DeviceProfile:
        return DeviceProfile(name, AffineLaw(*law), alone, sharing=SharingLaw(sync_s, most))

    first, second = (0.21, 0.024, 0.0, 0.18), (0.48, 0.038, 0.0, 0.0)
    devices = (
        *(device(f"a{k}", first, 0, 2.25, 4) for k in range(2)),
        *(device(f"b{k}", second, 0, 1.63, 4) for k in range(2)),
        device("c", (0.43, 0.089, 0.0, 0.0), 1, 2.95, 2),
    )
    problem = ClusterProblem(devices, 6, 4, 1, "bound")
    assert shared_partition(problem).best.latency_s == pytest.approx(fastest_s(problem))


@pytest.mark.parametrize("latency", LATENCIES)
def test_plans_of_devices_without_compute_time_are_the_fastest(latency: Latency) -> None:
    """Devices that take no time are planned alone and together with others."""
    free, usual = AffineLaw(0.0, 0.0, 0.0, 0.0), AffineLaw(0.5, 0.1, 0.0, 0.1)
    for laws in ([free, free], [free, usual], [AffineLaw(0.0, 1.0, 0.0, 0.0)] * 2):
        devices = tuple(
            DeviceProfile(f"d{k}", law, max_blocks=0, sharing=SharingLaw(0.01, 2))
            for k, law in enumerate(laws)
        )
        problem = ClusterProblem(devices, 2, 4, 2, latency)
        solution = shared_partition(problem)
        verify_cluster(solution, problem)
        assert solution.best.latency_s == pytest.approx(fastest_s(problem))


@pytest.mark.parametrize("solver", [exact_partition, shared_partition])
@pytest.mark.parametrize("draw", [drawn, tight])
def test_no_plan_is_faster_if_devices_take_no_time(
    draw: Callable[..., ClusterProblem], solver: ClusterSolver
) -> None:
    """Plans that take no time are equally fast, with any m and S."""
    found = set()
    for number in range(cases(few=20, many=1500)):
        rng = np.random.default_rng((3, number))
        problem = timeless(draw(rng), rng)
        if solver is exact_partition:
            alone = tuple(replace(each, sharing=None) for each in problem.devices)
            problem = replace(problem, devices=alone)
        solution = solved(problem, solver, fastest_at(problem, sampled_times(problem)))
        found |= {solution.best.latency_s > 0} if solution else set()
    assert found == {False, True}


@pytest.mark.parametrize("solve", [asteroid, adaptis])
def test_rules_of_other_systems_are_never_faster(solve: ClusterSolver) -> None:
    solved = 0
    for seed in range(60):
        problem = replace(drawn(np.random.default_rng(seed)), activation_s=(0.0,))
        try:
            found = solve(problem, np.random.default_rng(0))
        except InfeasibleRoundError:
            continue
        verify_cluster(found, problem)
        assert found.best.latency_s >= shared_partition(problem).best.latency_s * (1 - 1e-9)
        solved += 1
    assert solved > 10


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_asteroid_gives_no_rows_to_a_very_slow_device(slow: int) -> None:
    """This holds at every place in the order of devices."""
    laws = [AffineLaw(1e6 if k == slow else 1.0, 0.0, 1.0, 0.0) for k in range(3)]
    devices = tuple(
        DeviceProfile(str(k), law, sharing=SharingLaw(1e-3)) for k, law in enumerate(laws)
    )
    found = asteroid(ClusterProblem(devices, 4, 8, 4, "flow_shop"), np.random.default_rng(0))
    assert slow not in {k for stage in found.best.stages for k in stage.devices}
    assert found.best.latency_s < 100.0


@pytest.mark.parametrize("places_matter", [False, True])
def test_a_limit_of_nodes_leaves_a_valid_bound(places_matter: bool) -> None:
    """The bound never exceeds the best plan's time, and the found plan is never faster than the
    best."""
    limits, worse = (0, 1, 3, 8), set[int]()
    for seed in range(cases(few=20, many=400)):
        rng = np.random.default_rng(seed)
        own = tight(rng) if places_matter else drawn(rng, most_devices=5, most_blocks=8)
        problem = replace(own, activation_s=(0.0,), batch_size=24, max_micro_batches=24)

        def search(max_nodes: float, problem: ClusterProblem = problem) -> ClusterSolution:
            if not places_matter:
                return shared_partition(problem, max_nodes=max_nodes)
            found = placed_partition(problem, max_nodes=max_nodes)
            assert found
            return found

        try:
            best = search(math.inf).certificate.objective
        except InfeasibleRoundError:
            continue
        for max_nodes in limits:
            try:
                solution = search(max_nodes)
            except InfeasibleRoundError as error:
                assert "max_nodes" in str(error)
                continue
            assert solution.certificate.lower_bound <= best * (1 + 1e-9)
            assert solution.best.latency_s >= best * (1 - 1e-9)
            worse |= {max_nodes} if solution.best.latency_s > best * (1 + 1e-9) else set()
    assert worse == {*limits}


def test_a_large_cluster_has_a_lower_bound_and_a_gap() -> None:
    """With thirty different devices, only pipelines and one shared stage are compared."""
    rng = np.random.default_rng(0)
    laws = [AffineLaw(float(u), 0.01, 0.001, 0.002) for u in rng.uniform(0.1, 1, 30)]
    sharing = SharingLaw(0.001)
    devices = tuple(DeviceProfile(f"d{k}", law, sharing=sharing) for k, law in enumerate(laws))
    problem = ClusterProblem(devices, 12, 64, 16, "flow_shop")
    assert num_pairs(tuple(map(len, kinds_of(devices)))) > MOST_PAIRS
    solution = shared_partition(problem)
    verify_cluster(solution, problem)
    assert len(solution.best.stages[0].devices) > 20
    assert solution.best.latency_s < 0.7 * exact_partition(problem).best.latency_s
    assert 0 < solution.certificate.gap < 0.2


def test_of_many_small_devices_the_ten_largest_share_stages() -> None:
    """Twelve different devices each lack the memory for a block of a whole micro-batch. Their
    blocks differ in size, so that they are not merged."""
    devices = []
    for k in range(12):
        memory = MemoryBudget(2.1 + 0.001 * k, 0.0, 1.0 - 1e-6 * k, 0.3)
        law = AffineLaw(1 + 0.01 * k, 0.0, 0.1, 0.0)
        sharing = SharingLaw(0.01, 0 if k < 2 else None, memory)
        devices.append(DeviceProfile(f"d{k}", law, memory=memory, sharing=sharing))
    problem = ClusterProblem(tuple(devices), 2, 4, 1, "overlap")
    assert num_pairs(tuple(map(len, kinds_of(problem.devices)))) > MOST_PAIRS
    solution = shared_partition(problem)
    verify_cluster(solution, problem)
    ten = shared_partition(replace(problem, devices=problem.devices[2:]))
    assert solution.best.latency_s == ten.best.latency_s and not solution.complete
    with pytest.raises(InfeasibleRoundError, match="12 different devices are too many"):
        shared_partition(replace(problem, num_blocks=6))
    with pytest.raises(InfeasibleRoundError, match="hold at most 0 of 30 blocks"):
        shared_partition(replace(problem, num_blocks=30))


def test_equal_devices_need_few_states() -> None:
    law, sharing = AffineLaw(1.0, 0.1, 0.0, 0.0), SharingLaw(0.01)
    equal = [DeviceProfile(f"d{k}", law, sharing=sharing) for k in range(8)]
    other = DeviceProfile("x", replace(law, u=2.0), sharing=sharing)
    assert kinds_of((*equal[:4], other, *equal[4:])) == [[0, 1, 2, 3, 5, 6, 7, 8], [4]]
    states = states_of((8, 1))
    assert len(states.counts) == 18
    assert (states.counts[states.groups] <= states.counts[states.sets]).all()


def test_devices_without_a_sharing_law_share_no_stage() -> None:
    """The plan is as fast as the exact pipeline."""
    rng = np.random.default_rng(4)
    devices = tuple(
        DeviceProfile(f"d{k}", AffineLaw(float(u), 0.0, 0.01, 0.0))
        for k, u in enumerate(rng.uniform(0.1, 1, 4))
    )
    for latency in LATENCIES:
        problem = ClusterProblem(devices, 8, 16, 8, latency)
        best = shared_partition(problem).best
        assert best.latency_s == pytest.approx(exact_partition(problem).best.latency_s)
        assert not any(len(each.devices) > 1 for each in best.stages)


def test_the_law_bounds_a_simulated_batch() -> None:
    """A device does one micro-batch at a time and waits for all rows that it needs. A stage adds
    its gradients after its last micro-batch. A single stage takes exactly the law's time."""
    shared = 0
    for seed in range(120):
        plain = drawn(np.random.default_rng(seed))
        problem = replace(
            plain, latency="flow_shop", activation_s=(0.0,), head_s=0.0, gradient_s=0.0
        )
        try:
            best = shared_partition(problem).best
        except InfeasibleRoundError:
            continue
        simulated_s = _simulated(problem, best)
        shared += any(len(each.devices) > 1 for each in best.stages)
        assert simulated_s <= best.latency_s * (1 + 1e-9)
        if best.num_segments == 1:
            assert simulated_s == pytest.approx(best.latency_s)
    assert shared > 20


def test_the_slowest_device_may_not_determine_the_pace() -> None:
    """No device does two things at once in such a plan under ``overlap``."""
    others = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        devices = tuple(
            DeviceProfile(f"d{k}", AffineLaw(*map(float, rng.random(4))), sharing=SharingLaw(0.0))
            for k in range(3)
        )
        problem = ClusterProblem(devices, 2, 24, 4, "overlap")
        caps = [np.stack([row_caps(problem, device)] * 2) for device in devices]
        stage = stage_of(problem, range(3), 2, 4, caps)
        plan = partition_of_stages(problem, [stage], 4)
        compute, hop, _ = stage_times(problem, stage, 4)
        others += plan.slowest_s > max(compute, hop)
        segments, ends = timeline(problem, plan), list[float]()
        for each in segments:
            for starts, seconds in ((each.computes, each.compute_s), (each.hops, each.hop_s)):
                assert all(b - a >= seconds * (1 - 1e-9) for a, b in pairwise(starts))
            ends.append(each.hops[-1] + each.hop_s)
        assert max(ends) == pytest.approx(plan.latency_s)
    assert others > 5


@pytest.mark.parametrize("latency", ["flow_shop", "overlap"])
def test_no_device_does_two_things_at_once(latency: Latency) -> None:
    """The timeline of any plan, plus its syncs, ends within the plan's latency."""
    for seed in range(cases(few=40, many=100)):
        own = replace(drawn(np.random.default_rng(seed)), latency=latency, activation_s=(0.0,))
        problem = replace(own, head_s=0.0, gradient_s=0.0)
        try:
            best = shared_partition(problem).best
        except InfeasibleRoundError:
            continue
        ends, syncs = [0.0], dict[int, float]()
        for each in timeline(problem, best):
            syncs[each.span.first] = each.sync[1]
            ends += [start + each.hop_s for start in each.hops]
            for starts, seconds in ((each.computes, each.compute_s), (each.hops, each.hop_s)):
                assert all(b - a >= seconds * (1 - 1e-9) for a, b in pairwise(starts))
        assert max(ends) + sum(syncs.values()) <= best.latency_s * (1 + 1e-9)
        if len(best.stages or (0,)) == 1:
            assert max(ends) + sum(syncs.values()) == pytest.approx(best.latency_s)


def _simulated(problem: ClusterProblem, point: Partition) -> float:
    jobs, workers, before = dict[tuple[object, ...], Job](), list[Worker](), list[int]()
    m = point.num_micro_batches
    for place, stage in enumerate(stages_of(problem, point)):
        alone = len(stage.devices) == 1
        for device, rows in zip(stage.devices, stage.rows, strict=True):
            law, size = problem.devices[device].time, problem.batch_size / m if alone else rows
            for i in range(m):
                needs = tuple((place - 1, other, i) for other in before)
                jobs[place, device, i] = Job(law.chunk(stage.blocks, size), needs)
            workers.append(Worker(([(place, device, i) for i in range(m)],)))
        if not alone:
            laws = [problem.devices[k].sharing for k in stage.devices]
            slowest = max(law.sync_s for law in laws if law)
            sync_s = 2 * (1 - 1 / len(laws)) * stage.blocks * slowest
            jobs["sync", place] = Job(sync_s, tuple((place, k, m - 1) for k in stage.devices))
            workers.append(Worker(([("sync", place)],)))
        before = list(stage.devices)
    return max(end for _, end in simulate(jobs, workers, {}).values())


def test_the_error_of_a_search_without_a_plan_names_its_limit() -> None:
    """No device holds a block alone, so only the search finds plans."""
    law = AffineLaw(0.5, 0.1, 0.0, 0.1)
    devices = tuple(DeviceProfile(f"d{k}", law, 0, sharing=SharingLaw(0.01, 2)) for k in range(2))
    problem = ClusterProblem(devices, 2, 4, 2, "overlap")
    assert shared_partition(problem).best.stages
    with pytest.raises(InfeasibleRoundError, match=r"max_nodes=-1 .*; raise strategy\.max_nodes"):
        shared_partition(problem, max_nodes=-1)
