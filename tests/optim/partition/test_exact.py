"""Sub-1: the front is feasible and certified, and no other method is faster."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from collapipe.errors import InfeasibleRoundError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget
from optim.latency import block_caps
from optim.partition import additive
from optim.partition.exact import exact_partition
from optim.partition.knapsack import Bottleneck, Nodes
from optim.partition.rates import Rates
from optim.problem import ClusterProblem, ClusterSolution, Floats, Latency, Partition
from optim.verify import verify_cluster
from tests.optim.instances import heterogeneous, paper_like
from tests.optim.laws import pipeline_latency
from tests.optim.partition_references import (
    by_dynamic_programme,
    by_enumeration,
    by_full_devices,
    by_milp,
    by_thresholds,
)
from tests.thorough import cases, seeds

LAWS: tuple[Latency, ...] = get_args(Latency)
each_law = pytest.mark.parametrize("latency", LAWS)
many = settings(max_examples=3 * settings.default.max_examples)
TOLERANCE = 1e-9
Reference = Callable[[ClusterProblem, Floats], Floats]


def small(rng: np.random.Generator, latency: Latency) -> ClusterProblem:
    """Draw at most 4 devices and 6 blocks; in half of the draws ties are likely."""
    few = rng.random() < 0.5
    figures = rng.choice([0.0, 0.5, 1.0, 2.0], (4, 8)) if few else rng.uniform(0, 3, (4, 8))
    devices = []
    for k in range(rng.integers(1, 5)):
        u, v, w, ell, *of_energy = (float(figure) for figure in figures[k])
        limit = int(rng.integers(0, 7)) if rng.random() < 0.4 else None
        budget = EnergyBudget(
            float(rng.uniform(2, 60)),
            AffineLaw(*of_energy),
            "batch" if rng.random() < 0.5 else "micro_batch",
        )
        energy = budget if rng.random() < 0.3 else None
        devices.append(DeviceProfile(f"device-{k}", AffineLaw(u, v, w, ell), limit, energy))
    num_blocks, batch, most = (int(rng.integers(1, top)) for top in (7, 9, 7))
    return ClusterProblem(tuple(devices), num_blocks, batch, most, latency)


def curve(solution: ClusterSolution, max_segments: int) -> Floats:
    """Return the least latency with at most S segments, [Smax + 1]; infinite without a point."""
    least = np.full(max_segments + 1, np.inf)
    for point in solution.front:
        least[point.num_segments] = point.latency_s
    return np.minimum.accumulate(least)


def envelope(points: Iterable[Partition], uplinks: Floats, max_segments: int) -> Floats:
    """Return the least latency with at most S segments for each uplink time, [A, Smax + 1]."""
    least = np.full((len(uplinks), max_segments + 1), np.inf)
    for point in points:
        m, pace = point.num_micro_batches, point.slowest_s
        passed = point.latency_s - (m - 1) * pace
        latency = passed + uplinks / m + (m - 1) * np.maximum(pace, uplinks / m)
        best = least[:, point.num_segments]
        np.minimum(best, latency, out=best)
    return np.minimum.accumulate(least, axis=1)


def check(problem: ClusterProblem, solution: ClusterSolution) -> None:
    """Check everything that can be verified without solving."""
    caps = block_caps(problem)
    for point in solution.front:
        assert sum(point.blocks) == problem.num_blocks
        assert min(point.blocks) >= 0
        assert 1 <= point.num_micro_batches <= problem.max_micro_batches
        assert (np.array(point.blocks) <= caps[point.num_micro_batches - 1]).all()
        assert point.latency_s == pipeline_latency(
            problem.devices,
            point.blocks,
            problem.batch_size,
            point.num_micro_batches,
            problem.latency,
        )
    for one, other in itertools.pairwise(solution.front):
        assert one.num_segments < other.num_segments
        assert one.latency_s > other.latency_s
    assert solution.certificate.objective == solution.best.latency_s
    assert solution.certificate.lower_bound <= solution.best.latency_s


def check_exact(problem: ClusterProblem, expected: Floats) -> None:
    """Check that the front is feasible and certified, and has the expected latency at every S."""
    solution = exact_partition(problem)
    check(problem, solution)
    assert solution.certificate.gap <= TOLERANCE
    np.testing.assert_allclose(curve(solution, len(expected) - 1), expected, rtol=TOLERANCE)


def check_against_enumeration(problem: ClusterProblem) -> None:
    """Compare the front with enumeration, which may find that no partition is feasible."""
    expected = by_enumeration(problem)
    if math.isinf(expected[-1]):
        with pytest.raises(InfeasibleRoundError):
            exact_partition(problem)
    else:
        check_exact(problem, expected)


@each_law
@many
@given(seed=st.integers(0, 2**32))
@example(seed=1706)  # the lowest threshold is the best one
@example(seed=7882)  # a hop that is shorter than the device's one block
def test_the_front_equals_enumeration(latency: Latency, seed: int) -> None:
    """The clusters are small, with ties, zero costs and caps of all kinds."""
    check_against_enumeration(small(np.random.default_rng(seed), latency))


@each_law
@given(seed=st.integers(0, 2**32))
def test_the_front_equals_enumeration_with_memory_per_micro_batch(
    latency: Latency, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    problem = small(rng, latency)
    devices = tuple(
        replace(each, memory=MemoryBudget(*rng.uniform((0, 0, 0, 0), (30, 3, 3, 2)).tolist()))
        for each in problem.devices
    )
    check_against_enumeration(replace(problem, devices=devices))


# Uplink times, and the stages after the uplink


def uplinks_of(rng: np.random.Generator, scale_s: float) -> tuple[float, ...]:
    """Draw one uplink time, several, or all from one on, of the order of ``scale_s``."""
    low = scale_s * float(rng.choice([0.0, rng.uniform(0, 2), 10 ** rng.uniform(-3, 1)]))
    if rng.random() < 0.5:
        return (low, math.inf)
    more = np.cumsum(scale_s * 10 ** rng.uniform(-2, 1, rng.integers(0, 6)))
    return tuple(sorted({low, *(low + more).tolist()}))


def streaming(rng: np.random.Generator, problem: ClusterProblem, scale_s: float) -> ClusterProblem:
    """Return the cluster with uplink times, a head and a downlink."""
    later_s = scale_s * rng.choice([0.0, 1.0], 2) * 10 ** rng.uniform(-2, 1, 2)
    return replace(
        problem,
        activation_s=uplinks_of(rng, scale_s),
        head_s=float(later_s[0]),
        gradient_s=float(later_s[1]),
    )


def samples(problem: ClusterProblem, front: Iterable[Partition], scale_s: float) -> Floats:
    """Return the problem's uplink times; of a range, samples with all times at which a point
    changes.

    A range begins at the last finite time. The times before it are single ones.
    """
    *_, low, last = 0.0, *problem.activation_s
    if math.isfinite(last):
        return np.array(problem.activation_s)
    some = [low, *np.linspace(0, 3 * scale_s, 12), *np.geomspace(0.01, 100, 12) * scale_s]
    bends = [point.num_micro_batches * point.slowest_s for point in front]
    edges = [each for point in front for each in point.fastest_s if math.isfinite(each)]
    ranged = np.maximum([*some, *bends, *edges], low)
    return np.unique([*problem.activation_s[:-1], *ranged])


def check_streamed(problem: ClusterProblem, reference: Reference, scale_s: float) -> None:
    """Check that the front is verified, certified, and as fast as the reference at every S and
    time."""
    solution = exact_partition(problem)
    verify_cluster(solution, problem)
    assert solution.certificate.gap <= TOLERANCE
    assert solution.complete
    most, front = min(len(problem.devices), problem.num_blocks), solution.front
    uplinks = samples(problem, front, scale_s)
    expected = reference(problem, uplinks)
    np.testing.assert_allclose(envelope(front, uplinks, most), expected, rtol=TOLERANCE)
    assert solution.certificate.objective == pytest.approx(expected[0, -1], rel=TOLERANCE)
    alone = envelope([solution.best], uplinks[:1], most)[0, -1]
    assert solution.certificate.objective == pytest.approx(alone, rel=1e-12)
    for point in front:
        check_fastest(problem, point, front, uplinks, expected)


def check_fastest(
    problem: ClusterProblem,
    point: Partition,
    front: tuple[Partition, ...],
    uplinks: Floats,
    expected: Floats,
) -> None:
    """Check that the point is the fastest with at most its S at both ends of its range, and not
    outside."""
    size, (first, last) = point.num_segments, point.fastest_s
    own = envelope([point], uplinks, size)[:, size]
    fastest = own <= expected[:, size] * (1 + TOLERANCE)
    assert (fastest & (own < expected[:, size - 1])).any()
    if math.isfinite(problem.activation_s[-1]):
        assert (first, last) == (0.0, math.inf)
        return
    assert problem.activation_s[0] <= first <= last
    assert fastest[uplinks == first].all()
    assert fastest[uplinks == last].all()
    if last == math.inf:
        assert fastest[-1]
    few = [each for each in front if each.num_segments <= size and each != point]
    others = envelope(few, uplinks, size)[:, size]
    outside = (uplinks < first) | (last < uplinks)
    assert (others[outside] <= own[outside] * (1 + TOLERANCE)).all()


@each_law
@many
@given(seed=st.integers(0, 2**32))
@example(seed=319)  # all m are equally fast without an upload
@example(
    seed=789
)  # the same from some uplink time on, for points that differ only in the slowest stage
@example(seed=2630)  # the same for single times
def test_the_front_equals_enumeration_for_all_uplink_times(latency: Latency, seed: int) -> None:
    """The clusters are small, with ties, zero costs, caps of all kinds, a head and a downlink."""
    rng = np.random.default_rng(seed)
    problem = small(rng, latency)
    scale_s = float(by_enumeration(problem)[-1]) or 1.0
    if math.isinf(scale_s):
        with pytest.raises(InfeasibleRoundError):
            exact_partition(streaming(rng, problem, 1.0))
    else:
        check_streamed(streaming(rng, problem, scale_s), by_enumeration, scale_s)


@each_law
@given(seed=st.integers(0, 2**32))
def test_the_front_equals_enumeration_for_single_times_and_a_range(
    latency: Latency, seed: int
) -> None:
    """No point is the fastest only between the single times, which are not requested."""
    rng = np.random.default_rng(seed)
    problem = heterogeneous(rng, int(rng.integers(2, 5)), 6, latency, 8)
    scale_s = float(by_enumeration(problem)[-1])
    assume(math.isfinite(scale_s))
    finite = np.sort(scale_s * rng.uniform(0, 3, rng.integers(1, 4)))
    times = (0.0, *finite.tolist(), math.inf)
    later_s = scale_s * rng.choice([0.0, 0.3], 2)
    problem = replace(problem, activation_s=times, head_s=later_s[0], gradient_s=later_s[1])
    check_streamed(problem, by_enumeration, scale_s)


@pytest.mark.parametrize("seed", seeds(1, 3))
@each_law
def test_the_front_equals_an_unpruned_search_for_all_uplink_times(
    latency: Latency, seed: int
) -> None:
    """The clusters are of middle size, with every m up to 24 and several points of one S."""
    problem = heterogeneous(np.random.default_rng(seed), 8, 12, latency, 24)
    scale_s = exact_partition(problem).best.latency_s
    reference = by_thresholds if latency == "bound" else by_dynamic_programme
    problem = replace(problem, activation_s=(scale_s * 0.2 * seed, math.inf))
    check_streamed(problem, reference, scale_s)
    followed = replace(problem, head_s=0.3 * scale_s, gradient_s=0.1 * scale_s)
    check_streamed(followed, reference, scale_s)
    times = tuple((scale_s * np.array([0.3, 0.5, 0.9, 1.4])).tolist())
    check_streamed(replace(followed, activation_s=times), reference, scale_s)


def test_a_point_may_be_the_fastest_in_two_separate_ranges() -> None:
    """It is the fastest for the shortest and the longest uplink times, and another point between.

    Computed by hand: energy allows ``whole`` at most two micro-batches of 10 s, and ``parts`` at
    least three of 5.5 s, with a hop of 5.3 s. With an uplink time a they take 20 + a/2 and 21.8 +
    a/3, which are equal at 10.8. From 16.5 on the second takes 10.8 + a, and it is the fastest
    until 18.4.
    """
    problem = whole_or_parts(5.5, 5.3)
    check_streamed(problem, by_enumeration, 20.0)
    one, other = exact_partition(problem).front
    assert (one.blocks, one.num_micro_batches, *one.fastest_s) == ((1, 0), 2, 1.0, math.inf)
    assert (other.blocks, other.num_micro_batches) == ((0, 1), 3)
    assert other.fastest_s == pytest.approx((10.8, 18.4))


def whole_or_parts(compute_s: float, hop_s: float) -> ClusterProblem:
    """Return a device for at most two micro-batches of 10 s, and one for three."""
    each, sample = AffineLaw(0.0, 0.0, 0.0, 1.0), AffineLaw(0.0, 0.0, 1.0, 0.0)
    whole = DeviceProfile("whole", AffineLaw(10 / 6, 0.0, 0.0, 0.0), None, EnergyBudget(2.0, each))
    law, budget = (
        AffineLaw(compute_s / 4, 0, hop_s / 4, 0),
        EnergyBudget(4.0, sample, "micro_batch"),
    )
    parts = DeviceProfile("parts", law, None, budget)
    return ClusterProblem((whole, parts), 1, 12, 3, "overlap", (1.0, math.inf))


def test_with_a_slow_head_the_fastest_m_depends_on_the_uplink_time() -> None:
    """The head takes 100 s of a batch and is the slowest stage. With an uplink time a, m = 2 and m
    = 3 take 110 + a/2 and 120 + a/3 seconds, which are equal at a = 60."""
    problem = replace(whole_or_parts(10.2, 9.8), head_s=100.0)
    check_streamed(problem, by_enumeration, 60.0)
    one, other = exact_partition(problem).front
    assert (one.num_micro_batches, other.num_micro_batches) == (2, 3)
    assert (*one.fastest_s, *other.fastest_s) == pytest.approx((1.0, 60.0, 60.0, math.inf))


@each_law
@settings(max_examples=settings.default.max_examples // 4)
@given(seed=st.integers(0, 2**32))
def test_single_times_have_the_latencies_of_their_range(latency: Latency, seed: int) -> None:
    """One search for all times, one for each time and one for the range agree."""
    rng = np.random.default_rng(seed)
    problem = heterogeneous(rng, 6, 10, latency, 20)
    scale_s = exact_partition(problem).best.latency_s
    times = np.sort(scale_s * 10 ** rng.uniform(-1.5, 0.7, 4))
    whole = exact_partition(replace(problem, activation_s=(0.0, math.inf))).front
    several = exact_partition(replace(problem, activation_s=tuple(times.tolist()))).front
    expected = envelope(whole, times, 6)
    np.testing.assert_allclose(envelope(several, times, 6), expected, rtol=TOLERANCE)
    for place, each in enumerate(times.tolist()):
        single = exact_partition(replace(problem, activation_s=(each,)))
        found = envelope(single.front, times[[place]], 6)[0]
        np.testing.assert_allclose(found, expected[place], rtol=TOLERANCE)
        assert single.certificate.objective == pytest.approx(found[-1], rel=1e-12)


@each_law
@pytest.mark.parametrize("ratio", [1e10, 1e12, 1e13, 1e14])
def test_a_slow_device_does_not_hide_the_times_of_fast_ones(latency: Latency, ratio: float) -> None:
    """Compared with enumeration, with and without hops of the fast devices."""
    for hop in (0.0, 1e-8):
        devices = (
            DeviceProfile("slow", AffineLaw(1e-8 * ratio, 0.0, 0.0, 0.0)),
            DeviceProfile("fast", AffineLaw(1e-8, 0.0, hop, 0.0)),
            DeviceProfile("small", AffineLaw(2e-8, 0.0, hop, 0.0), 1),
        )
        problem = ClusterProblem(devices, 3, 8, 4, latency)
        check_exact(problem, by_enumeration(problem))


@each_law
@given(seed=st.integers(0, 2**32))
def test_the_front_equals_enumeration_for_laws_of_all_magnitudes(
    latency: Latency, seed: int
) -> None:
    """Within one cluster times range from 1e-12 to 1e6."""
    rng = np.random.default_rng(seed)
    laws = 10 ** rng.uniform(-12, 6, (4, 4)) * (rng.random((4, 4)) < 0.8)
    devices = tuple(
        DeviceProfile(f"device-{k}", AffineLaw(*map(float, law)), int(rng.integers(1, 7)))
        for k, law in enumerate(laws)
    )
    problem = ClusterProblem(devices, 4, 8, 4, latency)
    check_exact(problem, by_enumeration(problem))


@pytest.mark.parametrize("seed", seeds(2, 4))
@each_law
def test_the_front_equals_an_unpruned_search(latency: Latency, seed: int) -> None:
    """The clusters are of middle size, with every m up to 64."""
    problem = heterogeneous(np.random.default_rng(seed), 10, 16, latency)
    reference = by_thresholds if latency == "bound" else by_dynamic_programme
    check_exact(problem, reference(problem))


@each_law
@pytest.mark.parametrize("seed", seeds(3, 9))
def test_the_front_equals_mixed_integer_programming(latency: Latency, seed: int) -> None:
    """For a point's m and S it finds the point's latency, and for other m it finds no faster
    plan."""
    rng = np.random.default_rng(100 + seed)
    problem = heterogeneous(rng, 8, 14, latency)
    front = exact_partition(problem).front
    point = front[rng.integers(len(front))]
    found = by_milp(problem, point.num_micro_batches, point.num_segments)
    assert found == pytest.approx(point.latency_s, rel=TOLERANCE)
    for m in {max(1, point.num_micro_batches - 2), min(64, point.num_micro_batches + 2)}:
        other = by_milp(problem, m, point.num_segments)
        assert other >= point.latency_s * (1 - TOLERANCE)


@pytest.mark.parametrize("latency", ["flow_shop", "overlap"])
@many
@given(seed=st.integers(0, 2**32))
def test_the_relaxation_is_below_every_partition(latency: Latency, seed: int) -> None:
    """This holds for any price, with a known bottleneck, by compute or by hop, and without one."""
    rng = np.random.default_rng(seed)
    problem = replace(small(rng, latency), max_micro_batches=5)
    # Speeds far apart, and hops as long as several blocks of a slow device.
    devices = tuple(
        replace(device, time=AffineLaw(4.0**k, 0.1, 0.0, float(rng.uniform(0, 400))))
        for k, device in enumerate(problem.devices)
    )
    problem = replace(problem, devices=devices)
    rates, count = Rates.of(problem), len(problem.devices)
    blocks = np.bincount(rng.integers(count, size=problem.num_blocks), minlength=count)
    row = rng.integers(5, size=1)
    assume((blocks <= rates.caps[row[0]]).all())
    size = int((blocks > 0).sum())
    slowest = np.where(blocks > 0, rates.bottleneck(row, blocks[None])[0], -1)
    device = slowest.argmax(keepdims=True)
    threshold = slowest[device]
    by_hop = rates.hop[row, device] == threshold
    prices = rates.per_block[row[0]].mean() * rng.uniform(0, 3, (1, 6))
    latency_s = pipeline_latency(
        problem.devices, blocks.tolist(), problem.batch_size, int(row[0]) + 1, latency
    )
    bottleneck = Bottleneck(device, by_hop) if rng.random() < 0.8 else None
    zeros = np.zeros((1, rates.max_segments))
    nodes = Nodes.of(rates, row, threshold, threshold, zeros, bottleneck)
    least = nodes.relaxed(prices).fitting().least[0]
    assert (least[size - 1 :] <= latency_s * (1 + TOLERANCE)).all()


@pytest.mark.slow
@each_law
@pytest.mark.parametrize("devices", [24, pytest.param(48, marks=pytest.mark.thorough)])
def test_the_front_of_many_devices_equals_an_unpruned_search(
    latency: Latency, devices: int
) -> None:
    """There are two blocks per device. Small clusters do not reveal errors of pruning."""
    problem = heterogeneous(np.random.default_rng(48), devices, 2 * devices, latency, 64)
    if latency == "bound":
        check_exact(problem, by_thresholds(problem))
    else:
        problem = replace(problem, batch_size=2, max_micro_batches=2)
        check_exact(problem, by_full_devices(problem))


@pytest.mark.parametrize("latency", ["flow_shop", "overlap"])
def test_relaxations_leave_few_nodes_to_solve(latency: Latency) -> None:
    """Fewer than 50 of some thousands remain; with a wrong node's price a thousand remained."""
    problem = heterogeneous(np.random.default_rng(3), 48, 96, latency)
    with mock.patch.object(additive, "solve", wraps=additive.solve) as solved:
        exact_partition(problem)
    assert solved.call_count < 50


@each_law
@given(seed=st.integers(0, 2**32))
def test_more_resources_are_never_worse(latency: Latency, seed: int) -> None:
    """A faster device, more memory, more energy or one more device never increases a latency."""
    rng = np.random.default_rng(seed)
    problem = heterogeneous(rng, 5, 8, latency, 12)
    devices, k = problem.devices, int(rng.integers(5))
    one, share = devices[k], float(rng.uniform(0.1, 1))
    time = AffineLaw(one.time.u * share, one.time.v * share, one.time.w, one.time.ell * share)
    changes = [replace(one, time=time), replace(one, max_blocks=None), replace(one, energy=None)]
    before = curve(exact_partition(problem), 6)
    for change in changes:
        better = replace(problem, devices=(*devices[:k], change, *devices[k + 1 :]))
        assert (curve(exact_partition(better), 6) <= before * (1 + TOLERANCE)).all()
    more = replace(problem, devices=(*devices, replace(one, name="another")))
    assert (curve(exact_partition(more), 6) <= before * (1 + TOLERANCE)).all()


@each_law
@given(seed=st.integers(0, 2**32), factor=st.sampled_from([1e-6, 0.3, 7.0, 1e5]))
def test_latencies_scale_with_the_times(latency: Latency, seed: int, factor: float) -> None:
    """If all times are multiplied by a factor, so is the latency."""
    problem = heterogeneous(np.random.default_rng(seed), 6, 10, latency, 20)
    devices = []
    for device in problem.devices:
        law = device.time
        time = AffineLaw(law.u * factor, law.v * factor, law.w * factor, law.ell * factor)
        devices.append(replace(device, time=time))
    scaled = exact_partition(replace(problem, devices=tuple(devices)))
    expected = curve(exact_partition(problem), 6) * factor
    np.testing.assert_allclose(curve(scaled, 6), expected, rtol=TOLERANCE)


@each_law
@given(seed=st.integers(0, 2**32))
def test_the_order_of_devices_does_not_matter(latency: Latency, seed: int) -> None:
    """The front's latencies stay the same, and the same request gives the same answer."""
    rng = np.random.default_rng(seed)
    problem = heterogeneous(rng, 7, 11, latency, 20)
    shuffled = tuple(problem.devices[k] for k in rng.permutation(7))
    solution = exact_partition(problem)
    assert exact_partition(problem, rng) == solution
    other = curve(exact_partition(replace(problem, devices=shuffled)), 7)
    np.testing.assert_allclose(other, curve(solution, 7), rtol=TOLERANCE)


@each_law
@pytest.mark.parametrize(
    ("num_devices", "num_blocks", "max_micro_batches"),
    [(1, 9, 8), (6, 1, 8), (6, 3, 8), (6, 9, 1), (1, 1, 1)],
)
def test_the_front_of_the_smallest_clusters_equals_an_unpruned_search(
    latency: Latency, num_devices: int, num_blocks: int, max_micro_batches: int
) -> None:
    """The cases have one device, one block, fewer blocks than devices, or one micro-batch."""
    law = AffineLaw(1.0, 0.5, 0.1, 0.3)
    devices = tuple(DeviceProfile(f"device-{k}", law) for k in range(num_devices))
    problem = ClusterProblem(devices, num_blocks, 8, max_micro_batches, latency)
    reference = by_thresholds if latency == "bound" else by_dynamic_programme
    check_exact(problem, reference(problem))


@each_law
def test_the_front_of_equal_devices_equals_an_unpruned_search(latency: Latency) -> None:
    """Every threshold is a tie of many devices. With free hops more segments take no more time."""
    for law in (AffineLaw(1.0, 0.5, 0.3, 0.7), AffineLaw(1.0, 0.0, 0.0, 0.0)):
        devices = tuple(DeviceProfile(f"device-{k}", law, 3) for k in range(9))
        problem = ClusterProblem(devices, 14, 16, 16, latency)
        reference = by_thresholds if latency == "bound" else by_dynamic_programme
        check_exact(problem, reference(problem))


@each_law
@given(seed=st.integers(0, 2**32))
def test_a_front_of_few_kinds_of_devices_has_no_superfluous_point(
    latency: Latency, seed: int
) -> None:
    """Many partitions are equally fast, at all uplink times or from one on."""
    rng = np.random.default_rng(seed)
    laws = [
        AffineLaw(*map(float, rng.choice([0.5, 1.0, 2.0], 4))) for _ in range(rng.integers(1, 3))
    ]
    devices = tuple(
        DeviceProfile(f"device-{k}", laws[k % len(laws)], None if rng.random() < 0.5 else 4)
        for k in range(rng.integers(3, 7))
    )
    sizes = int(rng.integers(4, 13)), int(rng.integers(1, 33)), 12
    problem = ClusterProblem(devices, *sizes, latency)
    scale_s = exact_partition(problem).best.latency_s
    for _ in range(2):
        streamed = streaming(rng, problem, scale_s)
        verify_cluster(exact_partition(streamed), streamed)


@each_law
def test_of_equally_fast_m_the_smallest_is_chosen(latency: Latency) -> None:
    """A single device without overheads is equally fast with any m."""
    device = DeviceProfile("device", AffineLaw(1.0, 0.0, 0.0, 0.0))
    solution = exact_partition(ClusterProblem((device,), 5, 8, 8, latency))
    assert [point.num_micro_batches for point in solution.front] == [1]


@each_law
def test_the_front_of_paper_like_clusters_equals_an_unpruned_search(latency: Latency) -> None:
    """All hops take equally long."""
    for seed in range(3):
        problem = paper_like(np.random.default_rng(seed), latency)
        reference = by_thresholds if latency == "bound" else by_dynamic_programme
        check_exact(problem, reference(problem))


@each_law
def test_a_stopped_search_has_a_feasible_front_and_a_valid_bound(latency: Latency) -> None:
    alone = heterogeneous(np.random.default_rng(7), 12, 24, latency)
    scale_s = exact_partition(alone).best.latency_s
    check(alone, exact_partition(alone, max_nodes=0))
    smaller = heterogeneous(np.random.default_rng(7), 8, 14, latency, 24)
    uplinks_s, later_s = (0.5 * scale_s, math.inf), (0.3 * scale_s, 0.6 * scale_s)
    streamed = replace(smaller, activation_s=uplinks_s, head_s=later_s[0], gradient_s=later_s[1])
    for problem in (alone, streamed):
        best = exact_partition(problem).certificate.objective
        stopped = exact_partition(problem, max_nodes=0)
        verify_cluster(stopped, problem)
        assert not stopped.complete
        assert stopped.certificate.objective >= best
        assert 0 < stopped.certificate.lower_bound < best * (1 + TOLERANCE)
        assert stopped.certificate.gap > 0
        assert stopped.certificate.solver == "exact"
        assert stopped.certificate.solve_time_s > 0


@each_law
def test_a_limited_search_ends_at_the_same_node_on_a_slow_machine(
    latency: Latency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More nodes never lower the bound, and with enough nodes the front is complete."""
    problem = heterogeneous(np.random.default_rng(7), 6, 10, latency, 24)
    problem = replace(problem, activation_s=(0.0, 10.0, math.inf))
    limits = (0, 100, 500, 20_000)
    found = [exact_partition(problem, max_nodes=nodes) for nodes in limits]
    monkeypatch.setattr("time.perf_counter", itertools.count(step=1000).__next__)
    assert [exact_partition(problem, max_nodes=nodes) for nodes in limits] == found
    assert (found[0].complete, found[-1].complete) == (False, True)
    assert found[-1] == exact_partition(problem)
    bounds = [each.certificate.lower_bound for each in found]
    assert bounds == sorted(bounds)


def with_budget(limits: list[int | None], joules: float, num_blocks: int) -> ClusterProblem:
    """Return devices with these limits, the last one with an energy budget, and a batch of 4."""
    law = AffineLaw(1.0, 0.0, 0.0, 1.0)
    devices = [DeviceProfile(f"device-{k}", law, limit) for k, limit in enumerate(limits)]
    devices[-1] = replace(devices[-1], energy=EnergyBudget(joules, law))
    return ClusterProblem(tuple(devices), num_blocks, 4, 4, "bound")


def refusal(problem: ClusterProblem) -> str:
    """Return the error message, which is one line."""
    with pytest.raises(InfeasibleRoundError) as caught:
        exact_partition(problem)
    (line,) = str(caught.value).splitlines()
    return line


def test_too_little_memory_is_explained() -> None:
    """The error names the blocks that fit each device, and how many are missing."""
    line = refusal(with_budget([6, 2, 4], 1e9, 24))
    assert "at most 12 of 24 blocks in 1 micro-batch (device-0: 6 by max_blocks, device-1: " in line
    assert "device-0's max_blocks or device-1's max_blocks or " in line
    assert "max_blocks by 12 blocks in all" in line
    assert not any(each in line for each in ("energy", "memory", "LoRA"))


def test_a_limit_that_the_memory_of_a_device_has_shown_is_called_memory() -> None:
    problem = with_budget([6, 2, None], 1e9, 24)
    few = replace(problem, devices=tuple(each.at_most(4) for each in problem.devices))
    line = refusal(few)
    assert "(device-0: 4 by memory, device-1: 2 by max_blocks, device-2: 4 by memory)" in line
    assert "raise memory or device-1's max_blocks by 14 blocks in all" in line


def test_too_little_energy_is_explained() -> None:
    """The energy that the error names is enough."""
    line = refusal(with_budget([2, None], 10.0, 5))
    # m = 1: four samples and one hop are 4·δ + 1 J.
    assert "at most 4 of 5 blocks in 1 micro-batch (device-0: 2 by max_blocks, device-1: " in line
    assert "energy_j 10 where 3 blocks take 13 J); raise device-1's energy_j to 13, or " in line
    assert exact_partition(with_budget([2, None], 13.0, 5)).best.blocks == (2, 3)
    both = refusal(with_budget([2, 3], 10.0, 9))
    assert "device-1's energy_j to 13 and device-0's max_blocks by 4 blocks in all" in both


@each_law
def test_the_partition_for_a_fixed_m_is_as_good_as_by_enumeration(
    latency: Latency,
) -> None:
    """Later rounds keep their m. Energy and memory limit the partitions for each m."""
    rng, feasible = np.random.default_rng(11), 0
    for _ in range(cases(25, 40)):
        free = small(rng, latency)
        m, rows = free.max_micro_batches, block_caps(free)
        partitions = (
            blocks
            for blocks in itertools.product(range(free.num_blocks + 1), repeat=len(free.devices))
            if sum(blocks) == free.num_blocks and (np.array(blocks) <= rows[m - 1]).all()
        )
        sizes = free.batch_size, m, latency
        times = [pipeline_latency(free.devices, blocks, *sizes) for blocks in partitions]
        fixed = replace(free, min_micro_batches=m)
        if not times:
            with pytest.raises(InfeasibleRoundError):
                exact_partition(fixed)
            continue
        best = exact_partition(fixed).best
        assert best.num_micro_batches == m
        assert math.isclose(best.latency_s, min(times), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        feasible += 1
    assert feasible > 10
