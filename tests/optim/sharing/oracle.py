"""Brute force over all groups, orders, blocks, rows, modes and m, without the solver's code."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import permutations, product

from collapipe.state import DeviceProfile
from optim.problem import ClusterProblem

Group = tuple[int, ...]
Ways = Callable[[int, Group], set[DeviceProfile]]


def fastest_s(problem: ClusterProblem, most: int = 99) -> float:
    """Return the least seconds of a batch with at most ``most`` stages; infinite if no plan
    fits."""
    return fastest_at(problem, (0.0,), most)[0]


def fastest_at(problem: ClusterProblem, times: Sequence[float], most: int = 99) -> list[float]:
    """Return the least seconds of a batch for each uplink time; infinite if no plan fits."""
    best, ways = [math.inf] * len(times), cache(partial(_ways, problem))
    for m in range(problem.min_micro_batches, problem.max_micro_batches + 1):
        plans = set(_plans(problem, m, most, ways))
        for k, each_s in enumerate(time / m for time in times):
            all_s = (total + each_s + (m - 1) * max(pace, each_s) for total, pace in plans)
            best[k] = min(best[k], *all_s, math.inf)
    return best


def _plans(problem: ClusterProblem, m: int, most: int, ways: Ways) -> Iterator[tuple[float, float]]:
    """Yield each plan's seconds of one micro-batch and all syncs, and its pace, without the
    uplink."""
    later_s = [problem.head_s / m, problem.gradient_s / m]
    stage = cache(lambda *arguments: set(_stage(problem, m, ways, *arguments)))
    linked, places = any(each.links for each in problem.devices), len(problem.in_flight) or 1
    for groups in filter(lambda each: len(each) <= most, _orders(problem)):
        # Places and next devices that do not matter are made equal, so that stages are cached.
        place_each = [min(place, places) for place in range(len(groups), 0, -1)]
        following_each = [*groups[1:], ()] if linked else [()] * len(groups)
        for blocks in shares(problem.num_blocks, len(groups)):
            options = map(stage, groups, blocks, place_each, following_each)
            for times in product(*options):
                paces = [pace for pace, _, _ in times]
                sums = [once for _, once, _ in times]
                if problem.latency == "bound":
                    sums = [max(paces)] * len(paces)
                total = sum(sums) + sum(sync for *_, sync in times) + sum(later_s)
                yield total, max(*paces, *later_s)


def _orders(problem: ClusterProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all groups, in all orders if memory or hops depend on the order."""
    ordered = len(problem.in_flight) > 1 or any(each.links for each in problem.devices)
    for groups in _groups(tuple(range(len(problem.devices)))):
        yield from permutations(groups) if ordered else [tuple(groups)]


def _stage(
    problem: ClusterProblem,
    m: int,
    ways: Ways,
    group: Group,
    blocks: int,
    place: int,
    following: Group,
) -> Iterator[tuple[float, float, float]]:
    """Yield a stage's pace, compute plus hop, and sync in seconds, for all whole rows of its
    devices and both modes of each device."""
    if len(group) == 1:
        for device in ways(group[0], following):
            if fits_alone(problem, device, blocks, m, place):
                yield *times(problem, [device], [problem.batch_size / m], blocks), 0.0
        return
    if any(problem.devices[k].sharing is None for k in group):
        return
    rows = math.ceil(problem.batch_size / m)
    ring, pairs = 2 * (len(group) - 1) / len(group), permutations(group, 2)
    sync = ring * blocks * max(_sync_s(*(problem.devices[k] for k in pair)) for pair in pairs)
    for devices in product(*(ways(k, following) for k in group)):
        for split in shares(rows, len(devices)):
            if all(
                fits(problem, d, blocks, y, m, len(devices), place)
                for d, y in zip(devices, split, strict=True)
            ):
                yield *times(problem, devices, split, blocks), sync


def _ways(problem: ClusterProblem, number: int, following: Group) -> set[DeviceProfile]:
    """Return the device in either mode, with the hop to the next stage's devices."""
    device, names = problem.devices[number], [problem.devices[k].name for k in following]
    return {_sending(device.in_mode(on), names) for on in (False, True)}


def _sending(device: DeviceProfile, names: Sequence[str]) -> DeviceProfile:
    """Return the device with the time and joules of its slowest hop to devices with these names."""
    if not (names and device.links):
        return device
    own = {link.to: link for link in device.links}
    hops = [own.get(name, device.time) for name in names]
    time = replace(device.time, w=max(h.w for h in hops), ell=max(h.ell for h in hops))
    device = replace(device, time=time)
    if device.energy:
        joules = {link.to: link for link in device.energy.links}
        hops = [joules.get(name, device.energy.law) for name in names]
        law = replace(device.energy.law, w=max(h.w for h in hops), ell=max(h.ell for h in hops))
        device = replace(device, energy=replace(device.energy, law=law))
    return device


def _sync_s(device: DeviceProfile, to: DeviceProfile) -> float:
    assert device.sharing
    for link in device.links:
        if link.to == to.name and link.sync_s is not None:
            return link.sync_s
    return device.sharing.sync_s


def times(
    problem: ClusterProblem, devices: Sequence[DeviceProfile], rows: Sequence[float], blocks: int
) -> tuple[float, float]:
    pairs = [
        (blocks * (d.time.u * y + d.time.v), d.time.w * y + d.time.ell)
        for d, y in zip(devices, rows, strict=True)
    ]
    once = max(compute + hop for compute, hop in pairs)
    return (max(map(max, pairs)) if problem.latency == "overlap" else once), once


def fits_alone(
    problem: ClusterProblem, device: DeviceProfile, blocks: int, m: int, place: int
) -> bool:
    if device.max_blocks is not None and blocks > device.max_blocks:
        return False
    size, own = problem.batch_size / m, device.memory
    if own is not None:
        unused = 1 - _under_way(problem, m, place, math.ceil(size))
        each = own.block_bytes - own.batch_block_bytes * unused + own.sample_bytes * math.ceil(size)
        if own.segment_bytes - own.batch_segment_bytes * unused + blocks * each > own.limit_bytes:
            return False
    return _affords(device, blocks, size, m)


def _under_way(problem: ClusterProblem, m: int, place: int, rows: int) -> float:
    """Return the part of a batch's rows whose tensors a device with ``rows`` of each micro-batch
    keeps at this place from the end."""
    counts = problem.in_flight
    count = min(m, counts[min(place, len(counts)) - 1]) if counts else m
    return min(1.0, count * rows / problem.batch_size)


def fits(
    problem: ClusterProblem,
    device: DeviceProfile,
    blocks: int,
    rows: int,
    m: int,
    members: int,
    place: int = 99,
) -> bool:
    law = device.sharing
    assert law is not None
    if law.max_blocks is not None and blocks > law.max_blocks:
        return False
    if (own := law.memory) is not None:
        part = _under_way(problem, m, place, rows)
        each = own.block_bytes - own.batch_block_bytes * (1 - part) + own.sample_bytes * rows
        segment = own.segment_bytes - own.batch_segment_bytes * (1 - part)
        led = min(blocks, (blocks + members - 1) * rows / math.ceil(problem.batch_size / m))
        gradients = (members - 1) * led * own.trained_bytes
        if segment + blocks * each + gradients > own.limit_bytes:
            return False
    return _affords(device, blocks, rows, m, members)


def _affords(device: DeviceProfile, blocks: int, rows: float, m: int, members: int = 1) -> bool:
    if (budget := device.energy) is None:
        return True
    law = budget.law
    spent = blocks * (law.u * rows + law.v) + law.w * rows + law.ell
    if budget.scope == "batch":
        spent = m * spent + 2 * (members - 1) / members * blocks * budget.sync_j
    return spent <= budget.limit_j


def _groups(devices: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yield all ways to divide all or some devices into groups."""
    if not devices:
        yield []
        return
    first, *others = devices
    for rest in _groups(tuple(others)):
        yield rest
        yield [(first,), *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], (first, *group), *rest[place + 1 :]]


def shares(total: int, count: int) -> Iterator[list[int]]:
    """Yield all ways to split ``total`` into ``count`` positive parts."""
    if count == 1:
        yield [total]
    for own in range(1, total - count + 2) if count > 1 else ():
        yield from ([own, *rest] for rest in shares(total - own, count - 1))
