"""Print an inventory's plan as tables: one per cluster, and one for a joint round."""

import io
import math
import sys
from collections.abc import Sequence

from rich.console import Console

from collapipe.cli.plan.round_table import show_round
from collapipe.cli.plan.summary import summary
from collapipe.devices.hardware import PhysicalDevice
from collapipe.formatting import (
    block_range,
    counted,
    print_lines,
    print_table,
    seconds,
    three_digits,
)
from collapipe.inventory.model import Model
from collapipe.inventory.planned import InventoryPlan, PlannedCluster
from collapipe.state import received_gradients
from optim.timeline import SegmentTimes

_COLUMNS = ("device", "blocks", "memory", "compute", "hop", "busy", "fill", "gaps", "drain")
_IDLING_COLUMNS = 3  # the last columns of _COLUMNS
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def show(plan: InventoryPlan) -> None:
    """Print every cluster's plan, then the joint round, if any."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding may lack a name's letters
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, markup=False, emoji=False)
    for planned in plan.clusters:
        _show_cluster(console, planned, plan.inventory.model)
    if plan.round:
        show_round(console, plan, plan.round)


def _show_cluster(console: Console, planned: PlannedCluster, model: Model) -> None:
    problem, segments = planned.problem, planned.segments
    console.print(
        f"{planned.cluster.name}: {counted(problem.num_blocks, 'block')} on "
        f"{counted(len(problem.devices), 'device')}, batches of {problem.batch_size}, "
        f"law {problem.latency}",
        style="bold",
    )
    held = {each.device: each for each in segments}
    rows, held_by = [], list[str]()
    for k in planned.order:
        device, segment = planned.cluster.devices[k], held.get(k)
        if segment is None:
            rows.append((device.name, "-", _memory(device, 0, model, 0.0), "not used", *"-----"))
            continue
        needed = _needed_bytes(planned, segments, segment, model)
        used = _memory(device, segment.span.blocks, model, needed)
        shares = _shares(segment, planned.partition.latency_s)
        rows.append((device.name, _span(segment, _rows_in_all(planned)), used, *shares))
        held_by += [f"{device.name} {used}"] * (used != "-")
    with_idling = print_table(console, _COLUMNS, rows, _IDLING_COLUMNS)
    print_lines(console, summary(planned, model, ", ".join(held_by), with_idling))
    console.print()


def _rows_in_all(planned: PlannedCluster) -> int:
    """Return the rows of the largest micro-batch."""
    return math.ceil(planned.problem.batch_size / planned.partition.num_micro_batches)


def _span(segment: SegmentTimes, rows_in_all: int) -> str:
    rows = "" if segment.rows is None else f", {counted(segment.rows, 'row')} of {rows_in_all}"
    return f"{block_range(segment.span)}{rows}"


def _needed_bytes(
    planned: PlannedCluster,
    segments: Sequence[SegmentTimes],
    segment: SegmentTimes,
    model: Model,
) -> float:
    """Return the memory that a device needs for its ``segment`` of all ``segments``."""
    problem, partition, span = planned.problem, planned.partition, segment.span
    rows_in_all = own_rows = _rows_in_all(planned)
    members = 1
    if partition.replicated:
        own_rows = math.ceil(problem.batch_size / len(segments))
    elif segment.rows is not None:
        own_rows = segment.rows
        members = sum(each.span == span for each in segments)
    recomputes = segment.device in partition.recomputing
    cost = model.recomputing if recomputes and model.recomputing else model.cost
    place = len({each.span.first for each in segments if each.span.first >= span.first})  # from end
    kept = problem.kept(partition.num_micro_batches, place, own_rows)
    gradients = received_gradients(span.blocks, own_rows / rows_in_all, members)
    return cost.segment_needs(span.blocks, own_rows, kept, gradients)


def _memory(device: PhysicalDevice, blocks: int, model: Model, used: float) -> str:
    """Return the use of the limiting resource: the device's bytes, or its number of blocks."""
    if model.block_bytes and "memory_bytes" in device.block_limits(model.block_bytes):
        return _of(used, device.memory_bytes)
    if device.max_blocks is not None:
        return f"{blocks} of {counted(device.max_blocks, 'block')}"
    return _of(used, None) if model.block_bytes else "-"


def _of(used: float, limit: float | None) -> str:
    largest = used if limit is None else limit
    scale, unit = next((pair for pair in _BYTES if largest >= pair[0]), _BYTES[-1])
    of = "" if limit is None else f" of {three_digits(limit / scale)}"
    return f"{three_digits(used / scale)}{of} {unit}"


def _shares(segment: SegmentTimes, latency_s: float) -> tuple[str, ...]:
    """Return a micro-batch's compute and hop times, and the busy, fill, gap and drain shares."""
    begins, each_s = segment.computes, segment.compute_s
    busy, fill, drain = len(begins) * each_s, begins[0], latency_s - (begins[-1] + each_s)
    gaps = latency_s - fill - drain - busy
    shares = (f"{max(part, 0.0) / latency_s:.0%}" for part in (busy, fill, gaps, drain))
    hop = seconds(segment.hop_s) if segment.hop_s else "-"
    return seconds(segment.compute_s), hop, *shares
