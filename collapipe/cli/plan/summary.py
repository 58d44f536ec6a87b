"""The lines below a cluster's table: what fits, what the columns mean, and how good the plan is."""

from itertools import chain, combinations, pairwise, product

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.formatting import amount, certainty, counted, seconds, three_digits
from collapipe.inventory.model import Model
from collapipe.inventory.planned import PlannedCluster
from collapipe.inventory.planning import EXACT, SHARED
from optim.latency import round_up
from optim.problem import ClusterProblem, Partition
from optim.sharing.law import energy_j, stages_of
from optim.sharing.modes import fits, held_in_order
from optim.sharing.states import kinds_of, num_pairs
from optim.solvers import cluster_solver
from optim.timeline import SegmentTimes
from optim.verified import solve_verified

_FRONT_ENDS = 4  # points shown at each end of a long front
_IDLING = "; fill, gaps, drain: idle before, between and after that"
_ROUNDING = 1e-9
_MOST_PAIRS, _WORTH = 3**6, 0.005  # of sets for which sharing is tried; least gain that is shown
_REPLICAS = "vanilla_fl counts neither sending activations nor adding gradients"
_NO_SHARING = (
    "no stage can be shared: devices need d2d_rate_bps or a measured chunk, and the model a name "
    "or trained_bytes"
)


def summary(
    planned: PlannedCluster, model: Model, held_by: str, with_idling: bool
) -> list[tuple[str, str]]:
    """Return labels and texts: how the plan fits (``held_by`` says what each device holds), what
    the table's columns mean, and how good the plan is."""
    problem, partition, segments = planned.problem, planned.partition, planned.segments
    lines = [
        ("fits", _fits(planned, held_by, model)),
        ("embedding", _embedding(problem, model) if model.end_bytes else ""),
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
        return "to the control unit; not counted, since the file gives no time"
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
