"""Laws of the pipeline's time against simulated schedules; caps by memory and energy."""

import math
import statistics
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget
from optim.latency import block_caps, micro_batch_sizes, model_too_large, round_up
from optim.problem import ClusterProblem, Latency
from optim.step import in_flight
from pipeline.schedule import SCHEDULES, Schedule, alternate, gpipe, one_f_one_b
from tests.optim.discrete_event import Chunk, Sender, makespan
from tests.optim.laws import pipeline_latency

SENDERS: dict[Latency, Sender] = {"flow_shop": "device", "overlap": "link"}

laws = st.builds(
    AffineLaw,
    *[st.one_of(st.just(0.0), st.floats(1e-3, 10.0))] * 2,
    *[st.one_of(st.just(0.0), st.floats(1e-9, 10.0))] * 2,
)
"""Laws of one direction; either part of the compute may be 0."""


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw the blocks of each segment, b and m."""
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    return blocks, draw(st.integers(1, 32)), draw(st.integers(1, 10))


def profiles(laws: list[AffineLaw]) -> list[DeviceProfile]:
    """Return devices with these laws."""
    return [DeviceProfile(f"device-{k}", law) for k, law in enumerate(laws)]


def chunks(laws: list[AffineLaw], blocks: list[int], size: float) -> list[Chunk]:
    """Return the chunks of one micro-batch."""
    pairs = zip(laws, blocks, strict=True)
    return [Chunk(law.compute(held, size), law.hop(size)) for law, held in pairs]


@pytest.mark.parametrize("latency", ["flow_shop", "overlap"])
@given(clusters(), st.data())
def test_gpipe_takes_the_sum_of_the_laws_of_both_directions(
    latency: Latency, cluster: tuple[list[int], int, int], data: st.DataObject
) -> None:
    """The time is exactly the law of the forward chunks plus the law of the backward chunks."""
    blocks, batch_size, m = cluster
    count = len(blocks)
    forward = data.draw(st.lists(laws, min_size=count, max_size=count))
    backward = data.draw(st.lists(laws, min_size=count, max_size=count))
    size = batch_size / m
    run = makespan(
        gpipe(count, m),
        chunks(forward, blocks, size),
        chunks(backward, blocks, size),
        SENDERS[latency],
    )
    law = sum(
        pipeline_latency(profiles(way), blocks, batch_size, m, latency)
        for way in (forward, backward)
    )
    assert run == pytest.approx(law, rel=1e-12)


def random_cases(count: int, hops: bool) -> list[tuple[list[Chunk], list[Chunk], int]]:
    """Draw forward and backward chunks of up to eight devices, and m.

    Backward computes take twice as long as forward on every device, and hops take equally long.
    """
    rng, cases = np.random.default_rng(1), []
    for _ in range(count):
        segments, m = int(rng.integers(1, 9)), int(rng.integers(1, 17))
        computes = rng.uniform(0.1, 1.0, segments)
        sent = rng.uniform(0.05, 1.0, segments) * hops
        forward = [Chunk(*pair) for pair in zip(computes, sent, strict=True)]
        cases.append((forward, [Chunk(2 * c.compute_s, c.hop_s) for c in forward], m))
    return cases


def law_of(chunks: list[Chunk], m: int, latency: Latency) -> float:
    """Return the law's time with one block per chunk and one sample per micro-batch."""
    devices = profiles([AffineLaw(chunk.compute_s, 0.0, 0.0, chunk.hop_s) for chunk in chunks])
    return pipeline_latency(devices, [1] * len(chunks), m, m, latency)


def together(forward: list[Chunk], backward: list[Chunk]) -> list[Chunk]:
    """Return one chunk per micro-batch for both directions, as planners use it."""
    pairs = zip(forward, backward, strict=True)
    return [Chunk(f.compute_s + b.compute_s, f.hop_s + b.hop_s) for f, b in pairs]


def test_one_f_one_b_stays_within_the_law_of_combined_chunks() -> None:
    """Hops take no time and all devices have one ratio of backward to forward. The mean is 0.97."""
    ratios = [
        makespan(one_f_one_b(len(forward), m), forward, backward, "device")
        / law_of(together(forward, backward), m, "flow_shop")
        for forward, backward, m in random_cases(300, hops=False)
    ]
    assert max(ratios) <= 1 + 1e-12
    assert 0.95 < statistics.mean(ratios) < 0.99
    assert 0.75 < min(ratios) < 0.9


def test_gpipe_takes_the_law_if_one_device_is_slowest_both_ways() -> None:
    """It takes longer if one device is slow forward and another one backward."""
    for forward, backward, m in random_cases(100, hops=False):
        run = makespan(gpipe(len(forward), m), forward, backward, "device")
        assert run == pytest.approx(law_of(together(forward, backward), m, "flow_shop"), rel=1e-12)
    forward, backward = [Chunk(1.0), Chunk(3.0)], [Chunk(3.0), Chunk(1.0)]
    assert makespan(gpipe(2, 5), forward, backward, "device") == 8 + 4 * 6
    assert law_of(together(forward, backward), 5, "flow_shop") == 8 + 4 * 4


@given(clusters(), st.data())
def test_one_f_one_b_stays_within_the_sum_of_both_directions_laws(
    cluster: tuple[list[int], int, int], data: st.DataObject
) -> None:
    """This holds for all ratios and hops if a device cannot compute while it sends."""
    blocks, batch_size, m = cluster
    count = len(blocks)
    ways = [data.draw(st.lists(laws, min_size=count, max_size=count)) for _ in range(2)]
    forward, backward = (chunks(way, blocks, batch_size / m) for way in ways)
    run = makespan(one_f_one_b(count, m), forward, backward, "device")
    law = sum(pipeline_latency(profiles(way), blocks, batch_size, m, "flow_shop") for way in ways)
    assert run <= law * (1 + 1e-12)


def test_one_f_one_b_may_exceed_the_overlap_law_with_slow_links() -> None:
    """It keeps at most one micro-batch in flight per remaining segment, too few to fill the
    links."""
    ratios = [
        makespan(one_f_one_b(len(forward), m), forward, backward, "link")
        / law_of(together(forward, backward), m, "overlap")
        for forward, backward, m in random_cases(300, hops=True)
    ]
    assert min(ratios) < 1 < max(ratios) < 2


def test_flow_shop_overestimates_sending_during_computing() -> None:
    """The run takes at most the time of ``flow_shop``, and 0.8 of it if hops are half of the
    computes."""
    ratios = [
        makespan(gpipe(len(forward), m), forward, backward, "link")
        / law_of(together(forward, backward), m, "flow_shop")
        for forward, backward, m in random_cases(300, hops=True)
    ]
    assert max(ratios) <= 1 + 1e-12
    assert 0.7 < statistics.mean(ratios) < 0.9


@given(clusters(), st.data())
def test_the_laws_are_ordered(cluster: tuple[list[int], int, int], data: st.DataObject) -> None:
    """``bound`` ≥ ``flow_shop`` ≥ ``overlap``; the first two are equal if all devices are alike."""
    blocks, batch_size, m = cluster
    drawn = data.draw(st.lists(laws, min_size=len(blocks), max_size=len(blocks)))

    def seconds(laws: list[AffineLaw], blocks: list[int], latency: Latency) -> float:
        return pipeline_latency(profiles(laws), blocks, batch_size, m, latency)

    bound, shop, overlap = (
        seconds(drawn, blocks, law) for law in ("bound", "flow_shop", "overlap")
    )
    assert bound >= shop * (1 - 1e-12)
    assert shop >= overlap * (1 - 1e-12)
    equal, shares = [drawn[0]] * len(blocks), [blocks[0]] * len(blocks)
    same = seconds(equal, shares, "flow_shop")
    assert seconds(equal, shares, "bound") == pytest.approx(same, rel=1e-12)


def test_devices_without_blocks_take_no_time() -> None:
    """They add no hop either. The expected numbers follow from the equations."""
    devices = profiles([AffineLaw(1.0, 0.5, 0.25, 2.0)] * 3)
    # b̂ = 4: C = 2·(4 + 0.5) = 9 and 4.5; H = 1 + 2 = 3 on both devices.
    assert pipeline_latency(devices, (2, 0, 1), 12, 3, "bound") == 4 * 12
    assert pipeline_latency(devices, (2, 0, 1), 12, 3, "flow_shop") == 19.5 + 2 * 12
    assert pipeline_latency(devices, (2, 0, 1), 12, 3, "overlap") == 19.5 + 2 * 9


# Caps of memory and energy


def cluster_of(
    energy: EnergyBudget | None, max_blocks: int | None = None, num_blocks: int = 9
) -> ClusterProblem:
    """Return a problem of one device, 12 samples and up to six micro-batches."""
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), max_blocks, energy)
    return ClusterProblem((device,), num_blocks, 12, 6, "flow_shop")


def test_sizes_of_micro_batches_are_real_numbers() -> None:
    assert micro_batch_sizes(cluster_of(None)).tolist() == [12, 6, 4, 3, 2.4, 2]


@pytest.mark.parametrize(
    ("max_blocks", "cap"), [(None, 9), (0, 0), (1, 1), (8, 8), (9, 9), (10, 9), (10**9, 9)]
)
def test_a_limit_of_blocks_caps_every_m_alike(max_blocks: int | None, cap: int) -> None:
    """The caps are at most L = 9."""
    caps = block_caps(cluster_of(None, max_blocks))
    assert caps.tolist() == [[cap]] * 6


def test_each_device_has_its_own_caps() -> None:
    """The smaller of its caps by memory and energy counts."""
    budget = EnergyBudget(12.0 * 5, AffineLaw(1.0, 0.0, 0.0, 0.0))
    devices = tuple(
        DeviceProfile(str(limit), AffineLaw(1.0, 0.0, 0.0, 0.0), limit, energy)
        for limit, energy in ((7, None), (7, budget), (3, budget))
    )
    problem = replace(cluster_of(None), devices=devices)
    assert block_caps(problem).tolist() == [[7, 5, 3]] * 6


def test_fewer_micro_batches_in_flight_leave_memory_for_more_blocks() -> None:
    """A block keeps 2 bytes plus 1 for each of 12 samples; a segment 3 plus 0.5 for each."""
    memory = MemoryBudget(60.0, 3.0 + 6.0, 2.0 + 12.0, 0.0, 6.0, 12.0)
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=memory)
    problem = replace(cluster_of(None), devices=(device,))
    held = [math.floor((60 - 3 - 0.5 * 12) / 14)] * 6
    assert block_caps(problem)[:, 0].tolist() == held
    samples = [min(12, 2 * math.ceil(12 / m)) for m in range(1, 7)]  # 12, 12, 8, 6, 6, 4
    held = [min(9, math.floor((60 - 3 - 0.5 * n) / (2 + n))) for n in samples]
    assert block_caps(replace(problem, in_flight=(2,)))[:, 0].tolist() == held
    assert held[0] < held[-1]


def test_the_first_device_keeps_the_most_micro_batches() -> None:
    assert in_flight("one_f_one_b", 4) == (2, 3, 4, 5)
    assert in_flight("gpipe", 4) == ()


@pytest.mark.parametrize("part", [2, 50])
def test_a_schedule_that_keeps_a_part_of_the_micro_batches_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A plan's number of micro-batches is not known when their memory is counted."""

    def keeping(num_segments: int, m: int) -> Schedule:
        return (*((alternate(m // part, m),) * num_segments), alternate(0, m))

    name = f"a {part}th"
    monkeypatch.setitem(SCHEDULES, name, keeping)
    message = rf"^pipeline\.schedule={name}: a segment keeps \d of 5 micro-batches, but \d+ of 259;"
    with pytest.raises(ConfigError, match=message):
        in_flight(name, 3)


positive = st.floats(1e-3, 1e3)


@given(st.tuples(positive, positive, positive), st.floats(1e-3, 1e5), st.integers(0, 9))
def test_memory_suffices_for_the_cap_and_not_for_one_block_more(
    law: tuple[float, float, float], limit_bytes: float, max_blocks: int
) -> None:
    """Checked in exact arithmetic, up to rounding. Smaller micro-batches leave memory for more
    blocks."""
    segment, block, sample = map(Fraction, law)

    def needed(held: int, m: int) -> Fraction:
        return segment + held * (block + sample * math.ceil(12 / m))

    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), max_blocks)
    device = replace(device, memory=MemoryBudget(limit_bytes, *law))
    caps = block_caps(replace(cluster_of(None), devices=(device,)))[:, 0].tolist()
    for m, cap in enumerate(caps, start=1):
        assert needed(cap, m) <= limit_bytes * (1 + 1e-9) or cap == 0
        assert cap == max_blocks or needed(cap + 1, m) > limit_bytes * (1 - 1e-9)
    assert caps == sorted(caps)


@pytest.mark.parametrize("scope", ["batch", "micro_batch"])
@given(st.tuples(positive, positive, positive, positive), st.floats(1e-3, 1e6))
def test_energy_suffices_for_the_cap_and_not_for_one_block_more(
    scope: str, law: tuple[float, float, float, float], limit_j: float
) -> None:
    """Checked in exact arithmetic, up to rounding."""
    budget = EnergyBudget(limit_j, AffineLaw(*law), "batch" if scope == "batch" else "micro_batch")
    for m, (cap,) in enumerate(block_caps(cluster_of(budget)).tolist(), start=1):
        assert _joules(budget, cap, m) <= limit_j * (1 + 1e-9) or cap == 0
        assert cap == 9 or _joules(budget, cap + 1, m) > limit_j * (1 - 1e-9)


@pytest.mark.parametrize("scope", ["batch", "micro_batch"])
@given(
    st.tuples(st.floats(0.001, 10), *[st.one_of(st.just(0.0), st.floats(1e-9, 10))] * 3),
    st.integers(1, 9),
    st.integers(1, 6),
)
def test_a_budget_for_exactly_n_blocks_allows_n(
    scope: str, law: tuple[float, float, float, float], held: int, m: int
) -> None:
    """Rounding does not change the number of blocks."""
    budget = EnergyBudget(0.0, AffineLaw(*law), "batch" if scope == "batch" else "micro_batch")
    exact = replace(budget, limit_j=float(_joules(budget, held, m)))
    assert block_caps(cluster_of(exact))[m - 1, 0] == held
    short = replace(budget, limit_j=float(_joules(budget, held, m)) * (1 - 1e-6))
    assert block_caps(cluster_of(short))[m - 1, 0] < held


@pytest.mark.parametrize(("limit_j", "cap"), [(0.0, 0), (17.9, 0), (18.1, 9)])
def test_caps_of_blocks_without_energy_depend_on_the_hops_alone(limit_j: float, cap: int) -> None:
    """A device can hold all blocks or no block: only the hops' 6·(2·1 + 1) J count."""
    budget = EnergyBudget(limit_j, AffineLaw(0.0, 0.0, 1.0, 1.0))
    assert block_caps(cluster_of(budget))[-1].tolist() == [cap]
    free = replace(budget, law=AffineLaw(0.0, 0.0, 0.0, 0.0))
    assert block_caps(cluster_of(free)).tolist() == [[9]] * 6


def test_more_micro_batches_lower_batch_caps_and_raise_micro_batch_caps() -> None:
    """Joules per micro-batch (v, ℓ) count m times in a batch; joules per sample do not."""
    law = AffineLaw(1.0, 1.0, 0.0, 2.0)
    # m·(δ·(12/m + 1) + 2) ≤ 100: 98/13, 96/14, 94/15, 92/16, 90/17, 88/18.
    batch = block_caps(cluster_of(EnergyBudget(100.0, law)))
    assert batch[:, 0].tolist() == [7, 6, 6, 5, 5, 4]
    # δ·(12/m + 1) + 2 ≤ 20: 18/13, 18/7, 18/5, 18/4, 18/3.4, 18/3.
    each = block_caps(cluster_of(EnergyBudget(20.0, law, "micro_batch")))
    assert each[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


@given(st.floats(1e-6, 1e12))
def test_rounding_up_adds_at_most_about_one_percent(value: float) -> None:
    assert value * (1 - 1e-9) <= float(round_up(value)) <= value * 1.0101


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_rounding_up_does_not_change_zero_and_infinity(value: float) -> None:
    assert float(round_up(value)) == value


def _joules(budget: EnergyBudget, held: int, m: int) -> Fraction:
    """Return the joules of eq. 16 in the budget's scope."""
    u, v, w, ell = (Fraction(getattr(budget.law, name)) for name in ("u", "v", "w", "ell"))
    size = Fraction(12, m)
    return (m if budget.scope == "batch" else 1) * (held * (u * size + v) + w * size + ell)


def test_the_error_for_too_little_memory_counts_the_smallest_micro_batches() -> None:
    memory = MemoryBudget(0.1, 0.0, 9.8, 0.0, 0.0, 0.8)
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=memory)
    problem = ClusterProblem((device,), 2, 8, 8, "overlap")
    assert "at most 0 of 2 blocks in 8 micro-batches" in str(model_too_large(problem))
