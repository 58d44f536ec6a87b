"""Print an inventory's plan as tables: one per cluster, and one for a joint round."""

import io
import math
import sys
from collections.abc import Sequence
from itertools import chain, combinations, pairwise, product

import numpy as np
from rich.console import Console

from collapipe.devices.hardware import PhysicalDevice
from collapipe.errors import InfeasibleRoundError
from collapipe.formatting import (
    amount,
    block_range,
    certainty,
    counted,
    print_lines,
    print_table,
    seconds,
    three_digits,
    watts,
)
from collapipe.inventory.model import Model
from collapipe.inventory.planning import EXACT, SHARED, InventoryPlan, JointRound, PlannedCluster
from collapipe.state import received_gradients
from optim.channel import links, power_limits
from optim.latency import round_up
from optim.problem import ClusterProblem, Partition
from optim.sharing.law import energy_j, stages_of
from optim.sharing.modes import fits, held_in_order
from optim.sharing.states import kinds_of, num_pairs
from optim.solvers import cluster_solver
from optim.timeline import SegmentTimes
from optim.verified import solve_verified

_COLUMNS = ("device", "blocks", "memory", "compute", "hop", "busy", "fill", "gaps", "drain")
_ROUND_COLUMNS = ("cluster", "channel", "power", "pipeline", "upload", "total", "drift", "queue")
_OWN_ROUND = "paper"  # the only other solver of rounds
_IDLING_COLUMNS = 3  # the last columns of _COLUMNS
_FRONT_ENDS = 4  # points shown at each end of a long front
_IDLING = "; fill, gaps, drain: idle before, between and after that"
_ROUNDING = 1e-9
_MOST_PAIRS, _WORTH = 3**6, 0.005  # of sets for which sharing is tried; least gain that is shown
_REPLICAS = "vanilla_fl counts neither sending activations nor adding gradients"
_NO_SHARING = (
    "no stage can be shared: devices need d2d_rate_bps or a measured chunk, and the model a name "
    "or trained_bytes"
)
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def show(plan: InventoryPlan) -> None:
    """Print every cluster's plan, then the joint round, if any."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding may lack a name's letters
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, markup=False, emoji=False)
    for planned in plan.clusters:
        _show_cluster(console, planned, plan.inventory.model)
    if plan.round:
        _show_round(console, plan, plan.round)


def _show_cluster(console: Console, planned: PlannedCluster, model: Model) -> None:
    problem, segments = planned.problem, planned.segments
    console.print(
        f"{planned.cluster.name}: {problem.num_blocks} blocks on "
        f"{counted(len(problem.devices), 'device')}, batches of {problem.batch_size}, "
        f"law {problem.latency}",
        style="bold",
    )
    held = {each.device: each for each in segments}
    rows_in_all = math.ceil(problem.batch_size / planned.partition.num_micro_batches)
    kept = _kept(segments, problem, planned.partition.num_micro_batches)
    rows, held_by = [], list[str]()
    for k in planned.order:
        device = planned.cluster.devices[k]
        span, needed, shares = "-", 0.0, ("not used", *"-----")
        if segment := held.get(k):
            span, own_rows, members = block_range(segment.span), rows_in_all, 1
            if planned.partition.replicated:
                own_rows = math.ceil(problem.batch_size / len(segments))
            if segment.rows is not None:
                own_rows = segment.rows
                members = sum(each.span == segment.span for each in segments)
                span += f", {counted(own_rows, 'row')} of {rows_in_all}"
            shares = _shares(segment, planned.partition.latency_s)
            part = own_rows / rows_in_all
            recomputes = k in planned.partition.recomputing
            cost = model.recomputing if recomputes and model.recomputing else model.cost
            needed = cost.segment_needs(
                segment.span.blocks,
                rows_in_all,
                kept[segment.span.first],
                part,
                received_gradients(segment.span.blocks, part, members),
            )
        blocks = segment.span.blocks if segment else 0
        used = _memory(device, blocks, model, needed)
        rows.append((device.name, span, used, *shares))
        held_by += [f"{device.name} {used}"] * (blocks > 0 and used != "-")
    with_idling = print_table(console, _COLUMNS, rows, _IDLING_COLUMNS)
    lines = [("fits", _fits(planned, ", ".join(held_by), model))]
    lines += [("embedding", _embedding(problem, model))] if model.end_bytes else []
    print_lines(console, [*lines, *_summary(planned, segments, with_idling)])
    console.print()


def _fits(planned: PlannedCluster, held_by: str, model: Model) -> str:
    """Return the least number of devices, what each one in use holds, and the speed. A pipeline may
    need more devices than the plan, which shares stages."""
    problem, unit = planned.problem, "tokens/s" if model.tokens else "samples/s"
    held, _ = held_in_order(planned.chosen.problem)
    used = len(planned.partition.blocks) - planned.partition.blocks.count(0)
    least = min(used, 1 + int((held < problem.num_blocks).sum(axis=0).min()))
    per_s = problem.batch_size * (model.tokens or 1) / planned.partition.latency_s
    texts = f"on {counted(least, 'device')} or more", held_by, f"{three_digits(per_s)} {unit}"
    return "; ".join(filter(None, texts))


def _embedding(problem: ClusterProblem, model: Model) -> str:
    """Return what the devices do not hold of a causal model."""
    embedding, head = (amount(each, "B") for each in model.end_bytes)
    times = "counted" if problem.head_s else "not counted without control_unit"
    return (
        f"{embedding} on the control unit; head {head} there or on the server, "
        f"{three_digits(model.head_blocks or 0)} blocks' work {times}"
    )


def _kept(
    segments: Sequence[SegmentTimes], problem: ClusterProblem, num_micro_batches: int
) -> dict[int, float]:
    """Return the part of a batch's rows whose tensors each stage keeps, by its first block."""
    firsts = sorted({each.span.first for each in segments})
    return {
        first: problem.kept(num_micro_batches, place)
        for place, first in enumerate(reversed(firsts), start=1)
    }


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


def _summary(
    planned: PlannedCluster, segments: tuple[SegmentTimes, ...], with_idling: bool
) -> list[tuple[str, str]]:
    problem, partition = planned.problem, planned.partition
    lines = [
        ("hop", _REPLICAS if partition.replicated else _hop(problem, segments)),
        ("busy", f"computing{_IDLING if with_idling else ''}"),
        ("a batch", f"{seconds(partition.latency_s)}; {_how(problem, partition)}"),
        ("head", _head(planned)),
        ("certainty", _certainty(planned)),
        ("slowest", _slowest(planned)),
        ("links", _links(planned)),
        ("sync", _sync(planned, segments)),
        ("recompute", _recompute(planned)),
        ("even split", _even(planned.chosen.problem, partition)),
        ("front", _front(planned.chosen.solution.front)),
        ("energy", ", ".join(_energies(problem, partition))),
        ("sharing", _sharing(planned)),
    ]
    return [(label, text) for label, text in lines if text]


def _hop(problem: ClusterProblem, segments: tuple[SegmentTimes, ...]) -> str:
    """Return the explanation of the column of hops."""
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
        f"S = {counted(partition.num_segments, 'segment')}, m = {counted(count, 'micro-batch')} "
        f"of {_samples(size)}"
    )


def _head(planned: PlannedCluster) -> str:
    """Return the head's place if the round chose it, and its time for a cluster alone."""
    places = {"server": "the edge server", "control_unit": "the control unit"}
    if not planned.allocation and (head_s := planned.problem.head_s):
        each_s = head_s / planned.partition.num_micro_batches
        return f"{seconds(each_s)} per micro-batch, after the last hop"
    if planned.cluster.control_unit and planned.cluster.head_s is None:
        return "not counted; model.head_blocks gives its work in blocks"
    if not planned.allocation or planned.partition.head is None:
        return ""
    return f"on {places[planned.partition.head]}, chosen by the round"


def _samples(number: str) -> str:
    return f"{number} sample{'s' if number != '1' else ''}"


def _certainty(planned: PlannedCluster) -> str:
    best = planned.chosen.solution.best
    if planned.partition == best:
        shared = planned.chosen.solution.certificate.solver == SHARED
        family = (
            "pipeline, with shared stages or without," if shared else "pipeline of single devices"
        )
        return certainty(planned.chosen.solution.certificate, family, "faster")
    fastest = f"the fastest, S = {best.num_segments}, takes {seconds(best.latency_s)}"
    return f"chosen by the round; {fastest}"


def _slowest(planned: PlannedCluster) -> str:
    """Return the slowest stage, which limits the pace, and whether it computes or sends."""
    problem, segments = planned.problem, planned.segments
    together = problem.latency != "overlap"

    def pace(each: SegmentTimes) -> float:
        return each.compute_s + each.hop_s if together else max(each.compute_s, each.hop_s)

    slowest = max(segments, key=pace)
    if together:
        what = "computing and sending" if slowest.hop_s else "computing"
    else:
        what = "computing" if slowest.compute_s >= slowest.hop_s else "sending"
    found = pace(slowest), f"{problem.devices[slowest.device].name}, {what}"
    if planned.uplink == "streamed":
        found = max([found, *((each.each_s, each.name) for each in planned.later_stages)])
    return f"{found[1]} {seconds(found[0])} per micro-batch"


def _links(planned: PlannedCluster) -> str:
    """Return which of the file's links the plan uses; empty if it has none."""
    devices, partition = planned.chosen.problem.devices, planned.partition
    total, used = sum(len(each.links) for each in devices) // 2, list[str]()
    stages = stages_of(planned.chosen.problem, partition)
    hops = chain.from_iterable(product(a.devices, b.devices) for a, b in pairwise(stages))
    for k, to in chain(hops, *(combinations(stage.devices, 2) for stage in stages)):
        if devices[to].name in {link.to for link in devices[k].links}:
            used.append(f"{devices[k].name} to {devices[to].name}")
    return f"{len(used)} of {total} in use{': ' if used else ''}{', '.join(used)}" if total else ""


def _sync(planned: PlannedCluster, segments: tuple[SegmentTimes, ...]) -> str:
    """Return how long shared stages add their gradients, or why no stage can be shared."""
    stages = {each.span: each.sync[1] for each in segments if each.rows is not None}
    if not stages:
        requested = planned.chosen.solution.certificate.solver == SHARED
        missing = all(each.sharing is None for each in planned.problem.devices)
        return _NO_SHARING if requested and missing else ""
    return (
        f"{seconds(sum(stages.values()))} after a batch, in which devices that share a stage add "
        "their gradients"
    )


def _sharing(planned: PlannedCluster) -> str:
    """Return how much faster shared stages are; empty if they are not, or not sought."""
    problem, solution = planned.chosen.problem, planned.chosen.solution
    pairs = num_pairs(tuple(map(len, kinds_of(problem.devices))))
    if planned.cluster.uplink or solution.certificate.solver != EXACT or pairs > _MOST_PAIRS:
        return ""
    best = solve_verified(problem, cluster_solver(SHARED), np.random.default_rng(0)).best
    change = best.latency_s / solution.best.latency_s - 1
    found = f"{seconds(best.latency_s)} ({change:.0%}) with stages that devices share"
    return f"{found}: --solver shared" if change <= -_WORTH else ""


def _recompute(planned: PlannedCluster) -> str:
    """Return which devices compute forward twice; empty if none does."""
    names = ", ".join(planned.cluster.devices[k].name for k in planned.partition.recomputing)
    return names and f"{names}: forward is computed twice, because memory is too small otherwise"


def _even(problem: ClusterProblem, partition: Partition) -> str:
    """Return the latency of an even split, ⌊L/K⌋ or ⌈L/K⌉ blocks per device, with its best m. Empty
    if the plan is this split."""
    if len(problem.devices) == 1:
        return ""
    solve, rng, beyond = cluster_solver("gpipe"), np.random.default_rng(0), ""
    try:
        even = solve_verified(problem, solve, rng).best
    except InfeasibleRoundError:
        even = solve(problem.unlimited(), rng).best
        stages, m = stages_of(problem, even), even.num_micro_batches
        over = [
            problem.devices[stage.devices[0]].name
            for place, stage in zip(range(len(stages), 0, -1), stages, strict=True)
            if not any(fits(problem, stage, stage.devices[0], m, place, on) for on in (False, True))
        ]
        beyond = f"; beyond the limits of {', '.join(over)}" if over else ""
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
    """Return the energy use of devices with a budget, and the devices whose budget is too small."""
    texts, share = [], problem.batch_size / len(problem.devices)
    spent_j = {} if partition.replicated else energy_j(problem, partition)
    for k, (device, blocks) in enumerate(zip(problem.devices, partition.blocks, strict=True)):
        if (budget := device.energy) is None:
            continue
        limit = f"{three_digits(budget.limit_j)} J"
        least = budget.law.chunk(1, problem.batch_size)  # a batch as one micro-batch
        if blocks:
            spent = spent_j[k] if spent_j else budget.law.compute(blocks, share)
            texts.append(f"{device.name} {three_digits(spent)} of {limit}")
        elif least > budget.limit_j:
            texts.append(f"{device.name} {limit}: a block needs {round_up(least)} J")
    return texts


def _show_round(console: Console, plan: InventoryPlan, joint: JointRound) -> None:
    options, certificate = joint.problem.options, joint.solution.certificate
    channels, units = len(joint.problem.channels), len(joint.problem.uplinks)
    console.print(
        f"round: {counted(channels, 'channel')} for {counted(units, 'cluster')}, "
        f"drift {options.drift}, V = {options.drift_weight:g} per s",
        style="bold",
    )
    print_table(
        console, _ROUND_COLUMNS, [_round_row(p, joint, n) for n, p in enumerate(plan.clusters)]
    )
    lines = [
        ("the round", f"{seconds(joint.makespan_s)}, until its slowest cluster is done"),
        ("objective", f"{certificate.objective:.6g}; {_round_certainty(plan.solver, joint)}"),
        *(("idle", line) for line in _idle_lines(plan, joint)),
    ]
    print_lines(console, lines)


def _round_certainty(solver: str, joint: JointRound) -> str:
    """Return the round's certainty; for a baseline's splits the exact solver chooses the units."""
    certificate = joint.solution.certificate
    if solver in (EXACT, SHARED, _OWN_ROUND):
        return certainty(certificate, "round of such pipelines", "better")
    return (
        f"the best round with these splits, by {certificate.solver}, in "
        f"{seconds(certificate.solve_time_s)}; how far from the best with others is not known"
    )


def _round_row(planned: PlannedCluster, joint: JointRound, unit: int) -> tuple[str, ...]:
    allocation = planned.allocation
    sending: tuple[str, ...] = ("idle", *"----")
    if allocation:
        times = map(seconds, (planned.partition.latency_s, allocation.upload_s, planned.total_s))
        sending = (f"{allocation.channel}", watts(allocation.power_w), *times)
    queue = f"{joint.problem.queues[unit]:.3g} -> {joint.queues[unit]:.3g}"
    return (planned.cluster.name, *sending, f"{joint.gammas[unit]:.3g}", queue)


def _idle_lines(plan: InventoryPlan, joint: JointRound) -> list[str]:
    """Return the idle clusters, and whether their energy would have allowed an upload."""
    problem, options = joint.problem, joint.problem.options
    pairs = links(problem.uplinks, problem.channels, options.fading, options.energy)
    possible, offered = power_limits(pairs).max(axis=(0, 2)) > 0, pairs.max_power_w > 0
    needed, at_full_power = (
        np.where(offered, joules, np.inf).min(axis=(0, 2))
        for joules in (pairs.energy_j / pairs.budgets, pairs.energies(pairs.max_power_w))
    )
    lines = []
    for unit in (n for n, planned in enumerate(plan.clusters) if not planned.allocation):
        why = "the channels serve others better in this round"
        if not possible[unit]:
            why = (
                f"at any power its upload costs more than {needed[unit]:.3g} J on every channel, "
                f"it has {problem.uplinks[unit].energy_j:.3g} J; "
                f"{round_up(at_full_power[unit])} J pay for full power"
            )
        lines.append(f"{plan.clusters[unit].cluster.name}: {why}")
    return lines
