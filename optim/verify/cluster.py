"""Verify a cluster's front: constraints C1, C2, C7 and C9', latencies, order and certificate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collapipe.state import AffineLaw, DeviceProfile, SharingLaw, received_gradients
from optim.problem import ClusterProblem, ClusterSolution, Floats, Ints, Partition
from optim.verify.limits import needed_bytes, possible
from optim.verify.stages import check_stages, latency_of_stages, over_links, places_from_the_end
from optim.verify.tolerance import MARGIN, check_certificate, differs, exceeds, is_count, violation
from optim.verify.witness import check_witness


def verify_cluster(solution: ClusterSolution, problem: ClusterProblem) -> None:
    """Check every point of the front, their order, the best one and its certificate.

    Replicas (VanillaFL) are checked separately: L blocks on every device, b/K samples on each, no
    micro-batches and no hop.

    Raises ``PlanViolationError`` with the constraint that fails, the device and the numbers.
    """
    if not solution.front:
        raise violation("front", "it is empty")
    for point in solution.front:
        check_plan(point, problem)
    _check_order(solution.front, problem)
    _check_best(solution, problem)
    _refute_bound(solution, problem)
    if solution.certificate.witness:
        check_witness(solution.certificate, problem)


def check_plan(point: Partition, problem: ClusterProblem) -> None:
    """Check one partition, whose devices recompute or not as it says, and its times. Raises like
    ``verify_cluster``."""
    check_point(point, problem)
    _check_latency(point, problem.in_modes(point.recomputing))


def check_point(point: Partition, problem: ClusterProblem) -> None:
    """Check C1, C2, C7 and C9' of one partition. Raises like ``verify_cluster``."""
    for k in point.recomputing:
        if not 0 <= k < len(problem.devices) or problem.devices[k].recomputing is None:
            raise violation("recomputing", f"device {k} cannot recompute")
    problem = problem.in_modes(point.recomputing)
    num_blocks, m = problem.num_blocks, point.num_micro_batches
    if len(point.blocks) != len(problem.devices):
        raise violation("C1", f"{_named(point)} are for {len(problem.devices)} devices")
    for device, held in zip(problem.devices, point.blocks, strict=True):
        if not is_count(held):
            raise violation("C1", f"{device.name} holds {held} blocks")
        if point.replicated and held != num_blocks:
            raise violation(
                "C1", f"replica on {device.name} holds {held} blocks, not L={num_blocks}"
            )
    if point.replicated and m != 1:
        raise violation("C1", f"replicas with m={m}, must be 1")
    least, most_m = problem.min_micro_batches, problem.max_micro_batches
    if not (point.replicated or (is_count(m) and least <= m <= most_m)):
        raise violation("C1", f"{_named(point)} with m={m}, must be {least} to {most_m}")
    if point.replicated and point.stages:
        raise violation("C2", "replicas have no stages")
    if point.stages:
        check_stages(point, problem)
    elif not point.replicated and (total := sum(point.blocks)) != num_blocks:
        raise violation("C1", f"{_named(point)} sum up to {total}, not L={num_blocks}")
    _check_caps(point, problem)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a device has to hold and compute, one of the ``count`` devices of its stage, and its
    ``limits`` there.

    It computes ``size`` samples of a micro-batch, in at most ``rows`` rows. It keeps the tensors of
    the part ``kept`` of a batch, and receives the gradients of ``gradients`` blocks.
    """

    device: DeviceProfile
    limits: DeviceProfile | SharingLaw
    held: int
    count: int
    size: float
    rows: int
    kept: float
    gradients: float

    def check_blocks(self) -> None:
        if (most := self.limits.max_blocks) is not None and self.held > most:
            raise violation(
                "C7", f"{self.device.name} holds {self.held} blocks, its limit is {most}"
            )

    def check_memory(self, m: int) -> None:
        if (memory := self.limits.memory) is None:
            return
        needed = float(needed_bytes(memory, self.held, self.rows, self.kept))
        needed += self.gradients * memory.trained_bytes
        if exceeds(needed, memory.limit_bytes):
            of_rows = f" of {self.rows} rows" if self.count > 1 else ""
            raise violation(
                "C7",
                f"{self.device.name} holds {self.held} blocks{of_rows}, which with m={m} take "
                f"{needed:.12g} bytes of {memory.limit_bytes:.12g}",
            )

    def check_energy(self, point: Partition) -> None:
        if (budget := self.device.energy) is None:
            return
        m, spent = point.num_micro_batches, _once(budget.law, self.held, self.size, point)
        if budget.scope == "batch":
            spent = m * spent + 2 * (1 - 1 / self.count) * self.held * budget.sync_j
        if exceeds(spent, budget.limit_j):
            raise violation(
                "C9'",
                f"{self.device.name} spends {spent:.12g} J a {budget.scope} on {self.held} blocks "
                f"with m={m}, its limit is {budget.limit_j:.12g} J",
            )


def _check_caps(point: Partition, problem: ClusterProblem) -> None:
    """Check that each device's load is within its limits: C7, C9'."""
    for load in _loads(point, over_links(point, problem)):
        load.check_blocks()
        load.check_memory(point.num_micro_batches)
        load.check_energy(point)


def _loads(point: Partition, problem: ClusterProblem) -> Iterator[_Load]:
    """Yield the loads of the devices that hold blocks. Raises like ``verify_cluster``."""
    b, m, devices = problem.batch_size, point.num_micro_batches, problem.devices
    if point.replicated:
        size, rows = b / len(devices), math.ceil(b / len(devices))
        for device, held in zip(devices, point.blocks, strict=True):
            yield _Load(device, device, held, 1, size, rows, rows / b, 0.0)
        return
    most, places = math.ceil(b / m), places_from_the_end(point)
    shared = [stage for stage in point.stages if len(stage.devices) > 1]
    members = {k: (s, own) for s in shared for k, own in zip(s.devices, s.rows, strict=True)}
    split = [stage for stage in point.stages if stage.shares]  # more shares than devices
    counts = {k: (n, len(s.shares) - n) for s in split for k, n in s.shares_of_each()}
    for k in np.flatnonzero(point.blocks).tolist():
        device, held = devices[k], point.blocks[k]
        limits: DeviceProfile | SharingLaw = device
        count, size, rows = 1, b / m, most
        if k in members:
            if device.sharing is None:
                raise violation("sharing", f"{device.name} shares a stage without a law for it")
            limits, (stage, rows) = device.sharing, members[k]
            count, size = len(stage.devices), rows
        own, others = counts.get(k, (1, count - 1))
        gradients = received_gradients(held, rows / most, count, own, others)
        kept = problem.kept(m, places[k], rows)
        yield _Load(device, limits, held, count, size, rows, kept, gradients)


def _check_latency(point: Partition, problem: ClusterProblem) -> None:
    if point.replicated:
        held, size = zip(problem.devices, point.blocks, strict=True), problem.batch_size
        each = (_once(d.time, count, size / len(problem.devices), point) for d, count in held)
        expected, slowest = max(each), 0.0
    else:
        expected, slowest = latency_of_stages(point, over_links(point, problem))
    for what, given, right in (
        ("latency", point.latency_s, expected),
        ("slowest stage", point.slowest_s, slowest),
    ):
        if not math.isfinite(right) or differs(given, right):
            raise violation(
                what,
                f"{given:.12g} s for {_named(point)} with m={point.num_micro_batches}, "
                f"{'replicas' if point.replicated else problem.latency} take {right:.12g} s",
            )


def _check_order(front: Sequence[Partition], problem: ClusterProblem) -> None:
    """Check that S ascends, and that no point is always slower than one before it."""
    uplinks = np.array(problem.activation_s)
    if math.isinf(uplinks[-1]):  # a range: two points differ most at their bends
        bends = [point.num_micro_batches * point.slowest_s for point in front]
        uplinks = np.append(uplinks[:-1], np.maximum(bends, uplinks[-2]))
    times = np.array([_with_uplink(point, uplinks) for point in front])
    for place, after in enumerate(front[1:], start=1):
        before = front[place - 1]
        if before.num_segments > after.num_segments:
            raise violation("front", f"S={after.num_segments} follows S={before.num_segments}")
        slower = (times[:place] <= times[place]).all(axis=1)
        if slower.any():
            other = front[int(slower.argmax())]
            raise violation(
                "front",
                f"S={after.num_segments} takes {after.latency_s:.12g} s and is never faster: "
                f"S={other.num_segments} takes {other.latency_s:.12g} s",
            )


def _check_best(solution: ClusterSolution, problem: ClusterProblem) -> None:
    if solution.best not in solution.front:
        raise violation("best", f"{_named(solution.best)} are not in the front")
    low = np.array(problem.activation_s[:1])
    least = min(float(_with_uplink(point, low)[0]) for point in solution.front)
    seconds = float(_with_uplink(solution.best, low)[0])
    if exceeds(seconds, least):
        raise violation("best", f"{seconds:.12g} s, another point takes {least:.12g} s")
    check_certificate(solution.certificate, seconds)


def _with_uplink(point: Partition, activation_s: Floats) -> Floats:
    """Return the seconds of a batch for uplink times ``activation_s``, [A]."""
    m, each = point.num_micro_batches, activation_s / point.num_micro_batches
    passed = point.latency_s - (m - 1) * point.slowest_s
    return np.asarray(passed + each + (m - 1) * np.maximum(point.slowest_s, each))


def _named(point: Partition) -> str:
    return f"blocks {', '.join(map(str, point.blocks))}"


def _once(law: AffineLaw, held: int, size: float, point: Partition) -> float:
    """Return the seconds or joules of ``size`` samples; replicas send nothing."""
    compute = held * law.u * size + held * law.v
    return compute if point.replicated else compute + law.w * size + law.ell


def _refute_bound(solution: ClusterSolution, problem: ClusterProblem) -> None:
    """Compare the lower bound with plans near the best one, whose times are simple: in the devices'
    order without links, and without recomputing."""
    if problem.linked or any(device.recomputing for device in problem.devices):
        return
    blocks, m = _near(solution.best, problem)
    passed, slowest = _stages(blocks, m, problem)
    each = problem.activation_s[0] / m
    seconds = passed + each + (m - 1) * np.maximum(slowest, each)
    can = possible(problem, margin=MARGIN)
    row, devices = m[:, None] - problem.min_micro_batches, np.arange(len(problem.devices))
    within = can[row, devices, np.minimum(blocks, problem.num_blocks)].all(axis=1)
    seconds = np.where(within, seconds, math.inf)
    best = int(np.argmin(seconds))
    if exceeds(solution.certificate.lower_bound, float(seconds[best])):
        raise violation(
            "lower bound",
            f"{solution.certificate.lower_bound:.12g} s, but blocks "
            f"{', '.join(map(str, blocks[best]))} with m={m[best]} take {seconds[best]:.12g} s",
        )


def _near(point: Partition, problem: ClusterProblem) -> tuple[Ints, Ints]:
    """Return partitions near ``point`` and their m, [P, K] and [P].

    These are the same blocks with every allowed m, one or all blocks of a device moved to another
    device, and all blocks on one device.
    """
    one = np.eye(len(problem.devices), dtype=np.int64)
    alone = problem.num_blocks * one
    held = alone[0] if point.replicated or point.stages else np.array(point.blocks)
    every_m = np.arange(problem.min_micro_batches, problem.max_micro_batches + 1)
    moved = [
        held + amount * (one - one[source])
        for source in np.flatnonzero(held)
        for amount in {1, int(held[source])}
    ]
    blocks = np.concatenate([np.tile(held, (len(every_m), 1)), *moved, alone])
    rest = np.full(len(blocks) - len(every_m), max(point.num_micro_batches, every_m[0]))
    return blocks, np.concatenate([every_m, rest])


def _stages(blocks: Ints, m: Ints, problem: ClusterProblem) -> tuple[Floats, Floats]:
    """Return the sum of a micro-batch's stages and the slowest stage, s, for ``blocks`` [P, K] and
    ``m`` [P]."""
    laws = [device.time for device in problem.devices]
    u, v = np.array([law.u for law in laws]), np.array([law.v for law in laws])
    w, ell = np.array([law.w for law in laws]), np.array([law.ell for law in laws])
    size = (problem.batch_size / m)[:, None]
    compute = blocks * u * size + blocks * v
    hop = np.where(blocks > 0, w * size + ell, 0.0)
    if problem.latency == "overlap":
        longest = np.max(np.maximum(compute, hop), axis=1)
    else:
        longest = np.max(compute + hop, axis=1)
    once: Floats = np.sum(compute + hop, axis=1)
    if problem.latency == "bound":
        once = longest * np.count_nonzero(blocks, axis=1)
    head, gradient = problem.head_s / m, problem.gradient_s / m
    return once + head + gradient, np.maximum(longest, np.maximum(head, gradient))
