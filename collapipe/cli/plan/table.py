"""An inventory's plan as tables, one a cluster."""

import io
import sys
from dataclasses import replace

import numpy as np
from rich.console import Console

from collapipe.devices.hardware import PhysicalDevice
from collapipe.errors import InfeasibleRoundError
from collapipe.formatting import (
    block_range,
    certainty,
    counted,
    enough,
    micro_batches,
    print_lines,
    print_table,
    seconds,
    three_digits,
)
from collapipe.planning.inventory_plan import InventoryPlan, PlannedCluster
from collapipe.state import DeviceProfile, EnergyBudget
from optim.latency import block_caps
from optim.problem import ClusterProblem, Partition
from optim.solvers import cluster_solver
from optim.timeline import SegmentTimes

_COLUMNS = ("device", "blocks", "memory", "compute", "hop", "busy", "fill", "gaps", "drain")
_IDLING_COLUMNS = 3  # the last ones
_FRONT_ENDS = 4  # points of a long front that are shown at each end
_IDLING = "; fill, gaps, drain: idle before, between and after that"
_ROUNDING = 1e-9
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def show(plan: InventoryPlan) -> None:
    """Print every cluster's plan, then the joint round where there is one."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may be more than its encoding can say
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, markup=False, emoji=False)
    for planned in plan.clusters:
        _show_cluster(console, planned, plan.inventory.block_bytes)
    if plan.round:
        from collapipe.cli.plan.round_table import show_round

        show_round(console, plan, plan.round)


def _show_cluster(console: Console, planned: PlannedCluster, block_bytes: float | None) -> None:
    problem, segments = planned.problem, planned.segments
    console.print(
        f"{planned.cluster.name}: {problem.num_blocks} blocks on "
        f"{counted(len(problem.devices), 'device')}, batches of {problem.batch_size}, "
        f"law {problem.latency}",
        style="bold",
    )
    held = {each.device: each for each in segments}
    rows = [
        _device_row(device, profile, held.get(place), planned.partition.latency_s, block_bytes)
        for place, (device, profile) in enumerate(
            zip(planned.cluster.devices, problem.devices, strict=True)
        )
    ]
    with_idling = print_table(console, _COLUMNS, rows, _IDLING_COLUMNS)
    print_lines(console, _summary(planned, segments, with_idling))
    console.print()


def _device_row(
    device: PhysicalDevice,
    profile: DeviceProfile,
    segment: SegmentTimes | None,
    latency_s: float,
    block_bytes: float | None,
) -> tuple[str, ...]:
    memory = _memory(device, profile, segment.span.blocks if segment else 0, block_bytes)
    if segment is None:
        return (device.name, "-", memory, "not used", *"-----")
    return (device.name, block_range(segment.span), memory, *_shares(segment, latency_s))


def _memory(
    device: PhysicalDevice, profile: DeviceProfile, blocks: int, block_bytes: float | None
) -> str:
    """Of what binds: the device's bytes, or its number of blocks."""
    if block_bytes and device.is_limited_by_memory(block_bytes):
        return _of(blocks * block_bytes, device.memory_bytes)
    if profile.max_blocks is not None:
        return f"{blocks} of {counted(profile.max_blocks, 'block')}"
    return _of(blocks * block_bytes, None) if block_bytes else "-"


def _of(used: float, limit: float | None) -> str:
    largest = used if limit is None else limit
    scale, unit = next((pair for pair in _BYTES if largest >= pair[0]), _BYTES[-1])
    of = "" if limit is None else f" of {three_digits(limit / scale)}"
    return f"{three_digits(used / scale)}{of} {unit}"


def _shares(segment: SegmentTimes, latency_s: float) -> tuple[str, ...]:
    """Compute and hop of a micro-batch; the batch's shares of working and three kinds of idling."""
    fill, drain = segment.first_s, latency_s - segment.last_s
    gaps = latency_s - fill - drain - segment.busy_s
    shares = (f"{max(part, 0.0) / latency_s:.0%}" for part in (segment.busy_s, fill, gaps, drain))
    return (seconds(segment.compute_s), seconds(segment.hop_s) if segment.hop_s else "-", *shares)


def _summary(
    planned: PlannedCluster, segments: tuple[SegmentTimes, ...], with_idling: bool
) -> list[tuple[str, str]]:
    problem, partition = planned.problem, planned.partition
    lines = [
        ("hop", "" if partition.replicated else _hop(problem, segments)),
        ("busy", f"computing{_IDLING if with_idling else ''}"),
        ("a batch", f"{seconds(partition.latency_s)}; {_how(problem, partition)}"),
        ("certainty", _certainty(planned)),
        ("slowest", _slowest(problem, segments)),
        ("even split", _even(problem, partition)),
        ("front", _front(planned.solution.front)),
        ("energy", ", ".join(_energies(problem, partition))),
    ]
    return [(label, text) for label, text in lines if text]


def _hop(problem: ClusterProblem, segments: tuple[SegmentTimes, ...]) -> str:
    """Where hops lead."""
    if len(problem.devices) == 1 and not segments[0].hop_s:
        return "to the control unit; not counted, since the file says of none"
    return "to the next device; the last one's, back to the control unit"


def _how(problem: ClusterProblem, partition: Partition) -> str:
    if partition.replicated:
        share = problem.batch_size / len(problem.devices)
        return f"every device trains the whole encoder on {_samples(f'{share:.3g}')}"
    count = partition.num_micro_batches
    least, more = divmod(problem.batch_size, count)
    size = f"{least} or {least + 1}" if more else f"{least}"
    return (
        f"S = {counted(partition.num_segments, 'segment')}, m = {micro_batches(count)} "
        f"of {_samples(size)}"
    )


def _samples(number: str) -> str:
    return f"{number} sample{'s' if number != '1' else ''}"


def _certainty(planned: PlannedCluster) -> str:
    best = planned.solution.best
    if planned.partition == best:
        return certainty(planned.solution.certificate)
    fastest = f"the fastest, S = {best.num_segments}, takes {seconds(best.latency_s)}"
    return f"chosen by the round; {fastest}"


def _slowest(problem: ClusterProblem, segments: tuple[SegmentTimes, ...]) -> str:
    """The device at whose pace the others work, and whether it computes or sends."""
    together = problem.latency != "overlap"

    def pace(each: SegmentTimes) -> float:
        return each.compute_s + each.hop_s if together else max(each.compute_s, each.hop_s)

    slowest = max(segments, key=pace)
    if together:
        what = "computing and sending" if slowest.hop_s else "computing"
    else:
        what = "computing" if slowest.compute_s >= slowest.hop_s else "sending"
    name = problem.devices[slowest.device].name
    return f"{name}, {what} {seconds(pace(slowest))} per micro-batch"


def _even(problem: ClusterProblem, partition: Partition) -> str:
    """What ⌊L/K⌋ or ⌈L/K⌉ blocks on each device cost with the m that suits them best.

    Empty where the plan is just that.
    """
    if len(problem.devices) == 1:
        return ""
    solve, rng, beyond = cluster_solver("gpipe"), np.random.default_rng(0), ""
    try:
        even = solve(problem, rng).best
    except InfeasibleRoundError:
        free = tuple(replace(each, max_blocks=None, energy=None) for each in problem.devices)
        even = solve(replace(problem, devices=free), rng).best
        caps = block_caps(problem)[even.num_micro_batches - 1]
        triples = zip(problem.devices, even.blocks, caps, strict=True)
        names = ", ".join(device.name for device, held, cap in triples if held > cap)
        beyond = f"; beyond the limits of {names}"
    factor = even.latency_s / partition.latency_s
    if partition.blocks == even.blocks and factor > 1 - _ROUNDING:
        return ""
    found = f"{seconds(even.latency_s)} (m={even.num_micro_batches})"
    return f"{found} over all devices, {factor:.2f} times as long{beyond}"


def _front(front: tuple[Partition, ...]) -> str:
    points = [
        f"S={each.num_segments} {seconds(each.latency_s)} (m={each.num_micro_batches})"
        for each in front
    ]
    if len(points) > 2 * _FRONT_ENDS:
        points[_FRONT_ENDS:-_FRONT_ENDS] = ["..."]
    return ", ".join(points)


def _energies(problem: ClusterProblem, partition: Partition) -> list[str]:
    """What devices with a budget spend, and which devices it keeps out."""
    texts = []
    for device, blocks in zip(problem.devices, partition.blocks, strict=True):
        if (budget := device.energy) is None:
            continue
        limit = f"{three_digits(budget.limit_j)} J"
        least = budget.law.chunk(1, problem.batch_size)  # of a batch in one piece
        if blocks:
            spent = three_digits(_joules(problem, partition, budget, blocks))
            texts.append(f"{device.name} {spent} of {limit}")
        elif least > budget.limit_j:
            texts.append(f"{device.name} {limit}: a block needs {enough(least)} J")
    return texts


def _joules(
    problem: ClusterProblem, partition: Partition, budget: EnergyBudget, blocks: int
) -> float:
    if partition.replicated:
        return budget.law.compute(blocks, problem.batch_size / len(problem.devices))
    count = partition.num_micro_batches
    return count * budget.law.chunk(blocks, problem.batch_size / count)
