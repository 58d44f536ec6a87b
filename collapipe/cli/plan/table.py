"""A decision as tables, one a cluster."""

import io
import sys
from collections.abc import Sequence

from rich.console import Console

from collapipe.cli.plan.decision import Decision
from collapipe.formatting import (
    certainty,
    counted,
    enough,
    micro_batches,
    print_lines,
    print_table,
    seconds,
    three_digits,
)
from collapipe.inventory.file import Box, Inventory
from collapipe.state import EnergyBudget
from optim.latency import block_caps, pipeline_latency
from optim.partition.baselines import even_blocks
from optim.problem import ClusterProblem, ClusterSolution, Ints, Partition
from optim.timeline import Stage, timeline

_COLUMNS = ("device", "blocks", "memory", "compute", "hop", "busy", "fill", "gaps", "drain")
_IDLING_COLUMNS = 3  # the last ones
_FRONT_ENDS = 4  # points of a long front that are shown at each end
_IDLING = "; fill, gaps, drain: idle before, between and after that"
_ROUNDING = 1e-9
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def show(decision: Decision) -> None:
    """Print every cluster's plan, then the joint round where there is one."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may be more than its encoding can say
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, markup=False, emoji=False)
    for unit in range(len(decision.problems)):
        _show_cluster(console, decision, unit)
    if decision.round:
        from collapipe.cli.plan.round_table import show_round

        show_round(console, decision, decision.round)


def _show_cluster(console: Console, decision: Decision, unit: int) -> None:
    inventory, problem = decision.inventory, decision.problems[unit]
    cluster, partition = inventory.clusters[unit], decision.partition(unit)
    console.print(
        f"{cluster.name}: {problem.num_blocks} blocks on {counted(len(cluster.boxes), 'device')}, "
        f"batches of {problem.batch_size}, law {problem.latency}",
        style="bold",
    )
    stages = timeline(problem, partition)
    rows = _device_rows(inventory, cluster.boxes, stages, partition)
    with_idling = print_table(console, _COLUMNS, rows, _IDLING_COLUMNS)
    print_lines(console, _summary(decision, unit, stages, with_idling))
    console.print()


def _device_rows(
    inventory: Inventory, boxes: tuple[Box, ...], stages: tuple[Stage, ...], partition: Partition
) -> list[tuple[str, ...]]:
    held = {stage.device: stage for stage in stages}
    rows = []
    for number, box in enumerate(boxes):
        stage = held.get(number)
        shares = _shares(stage, partition.latency_s) if stage else ("not used", *"-----")
        blocks = _blocks(stage) if stage else "-"
        memory = _memory(box, stage.span.blocks if stage else 0, inventory.block_bytes)
        rows.append((box.profile.name, blocks, memory, *shares))
    return rows


def _blocks(stage: Stage) -> str:
    first, last = stage.span.first, stage.span.stop - 1
    return f"{first}" if first == last else f"{first}-{last}"


def _memory(box: Box, blocks: int, block_bytes: float | None) -> str:
    """Of what binds: the device's bytes, or its number of blocks."""
    most = box.profile.max_blocks
    if box.memory_bytes is not None and block_bytes and most == box.memory_bytes // block_bytes:
        return _of(blocks * block_bytes, box.memory_bytes)
    if most is not None:
        return f"{blocks} of {counted(most, 'block')}"
    return _of(blocks * block_bytes, None) if block_bytes else "-"


def _of(used: float, limit: float | None) -> str:
    largest = used if limit is None else limit
    scale, unit = next((pair for pair in _BYTES if largest >= pair[0]), _BYTES[-1])
    of = "" if limit is None else f" of {three_digits(limit / scale)}"
    return f"{three_digits(used / scale)}{of} {unit}"


def _shares(stage: Stage, latency_s: float) -> tuple[str, ...]:
    """Compute and hop of a micro-batch; the batch's shares of working and three kinds of idling."""
    fill, drain = stage.first_s, latency_s - stage.last_s
    gaps = latency_s - fill - drain - stage.busy_s
    shares = (f"{max(part, 0.0) / latency_s:.0%}" for part in (stage.busy_s, fill, gaps, drain))
    return (seconds(stage.compute_s), seconds(stage.hop_s) if stage.hop_s else "-", *shares)


def _summary(
    decision: Decision, unit: int, stages: tuple[Stage, ...], with_idling: bool
) -> list[tuple[str, str]]:
    problem, solution = decision.problems[unit], decision.solutions[unit]
    partition = decision.partition(unit)
    lines = [
        *_hop(problem, partition, stages),
        ("busy", f"computing{_IDLING if with_idling else ''}"),
        ("a batch", f"{seconds(partition.latency_s)}; {_how(problem, partition)}"),
        ("certainty", _certainty(solution, partition)),
        ("slowest", _slowest(problem, stages)),
        *_even(problem, partition),
        ("front", _front(solution.front)),
    ]
    energies = _energies(problem, partition)
    return [*lines, ("energy", ", ".join(energies))] if energies else lines


def _hop(
    problem: ClusterProblem, partition: Partition, stages: tuple[Stage, ...]
) -> list[tuple[str, str]]:
    if partition.replicated:
        return []
    if len(problem.devices) == 1 and not stages[0].hop_s:
        return [("hop", "to the control unit; not counted, since the file says of none")]
    return [("hop", "to the next device; the last one's, back to the control unit")]


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


def _certainty(solution: ClusterSolution, partition: Partition) -> str:
    best = solution.best
    if partition == best:
        return certainty(solution.certificate)
    fastest = f"the fastest, S = {best.num_segments}, takes {seconds(best.latency_s)}"
    return f"chosen by the round; {fastest}"


def _slowest(problem: ClusterProblem, stages: tuple[Stage, ...]) -> str:
    """The stage at whose pace the others work, and whether it computes or sends."""
    together = problem.latency != "overlap"
    paces = [
        (stage.compute_s + stage.hop_s if together else max(stage.compute_s, stage.hop_s), stage)
        for stage in stages
    ]
    pace, stage = max(paces, key=lambda pair: pair[0])
    name = problem.devices[stage.device].name
    if together:
        what = "computing and sending" if stage.hop_s else "computing"
    else:
        what = "computing" if stage.compute_s >= stage.hop_s else "sending"
    return f"{name}, {what} {seconds(pace)} per micro-batch"


def _even(problem: ClusterProblem, partition: Partition) -> list[tuple[str, str]]:
    """What ⌊L/K⌋ or ⌈L/K⌉ blocks on each device cost with the m that suits them best.

    Nothing where the plan is just that.
    """
    blocks = _even_blocks(problem)
    if len(blocks) == 1:
        return []
    caps = block_caps(problem)
    counts = range(1, problem.max_micro_batches + 1)
    fitting = [count for count in counts if not _overloaded(problem, blocks, caps[count - 1])]
    latencies = {
        count: pipeline_latency(problem.devices, blocks, problem.batch_size, count, problem.latency)
        for count in fitting or counts
    }
    best = min(latencies, key=lambda count: latencies[count])
    factor = latencies[best] / partition.latency_s
    if list(partition.blocks) == blocks and factor > 1 - _ROUNDING:
        return []
    text = f"{seconds(latencies[best])} (m={best}) over all devices, {factor:.2f} times as long"
    if not fitting:
        text += f"; beyond the limits of {', '.join(_overloaded(problem, blocks, caps[best - 1]))}"
    return [("even split", text)]


def _even_blocks(problem: ClusterProblem) -> list[int]:
    used = min(problem.num_blocks, len(problem.devices))
    return even_blocks(problem.num_blocks, used) + [0] * (len(problem.devices) - used)


def _overloaded(problem: ClusterProblem, blocks: Sequence[int], caps: Ints) -> list[str]:
    """Devices whose memory or energy has no room for their blocks."""
    triples = zip(problem.devices, blocks, caps, strict=True)
    return [device.name for device, held, cap in triples if held > cap]


def _front(front: tuple[Partition, ...]) -> str:
    points = list(map(_point, front))
    if len(points) > 2 * _FRONT_ENDS:
        points[_FRONT_ENDS:-_FRONT_ENDS] = ["..."]
    return ", ".join(points)


def _point(partition: Partition) -> str:
    return (
        f"S={partition.num_segments} {seconds(partition.latency_s)} "
        f"(m={partition.num_micro_batches})"
    )


def _energies(problem: ClusterProblem, partition: Partition) -> list[str]:
    """What devices with a budget spend, and whom the budget keeps out."""
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
