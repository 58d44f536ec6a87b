"""The planned times of a local step: simulated with a measured law, or else by the closed law."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan
from collapipe.runs.folder import REQUESTS
from collapipe.runs.reading import Run
from collapipe.step_law import StepLaw
from optim.cluster.problem import as_planned, cluster_problem
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterProblem, Latency, Partition
from optim.sharing.law import partition_of_plan
from optim.simulated_plan import law_for, simulates, works_in
from optim.step import play
from optim.timeline import stages_after_encoder, timeline
from pipeline.schedule import BACKWARD


class PlannedTime(NamedTuple):
    """The time of a stage's action, or with ``sends`` of sending its output, in seconds since the
    step's beginning. ``kind`` is F or B, or empty for both together."""

    kind: str
    micro_batch: int
    begin_s: float
    end_s: float
    sends: bool = False


Stages = Mapping[str, Sequence[PlannedTime]]


def planned_step(run: Run, request: RoundRequest, cluster: ClusterPlan) -> Stages:
    """Return the planned times of each stage of a local step, in pipeline order.

    Stages are the devices; with a measured law also ``embedding`` and ``head``, else ``uplink``,
    ``head`` and ``gradients`` if the uplink is streamed. Raises ``ConfigError`` if the request does
    not know the unit or its devices.
    """
    unit_name, states = run.called(cluster.unit), {state.unit: state for state in request.clusters}
    if cluster.unit not in states:
        raise ConfigError(
            f"round {request.round}: {REQUESTS} lacks {unit_name}; delete it to omit plans"
        )
    state = as_planned(states[cluster.unit], cluster.uplink)
    latency = run.option("strategy.latency")
    closed = cast(Latency, latency if latency in LATENCIES else "overlap")  # as rounds are costed
    problem = cluster_problem(request, state, closed)
    known = cluster.in_modes({device.name: device for device in problem.devices})
    names = [name for segment in cluster.segments for name in segment.devices] or known
    if missing := ", ".join(set(names) - set(known)):
        raise ConfigError(f"{unit_name}: {REQUESTS} does not know its devices {missing}")
    problem = replace(problem, devices=tuple(known[name] for name in names))
    partition = Partition((), cluster.num_micro_batches, 0.0, replicated=True)
    if cluster.segments:
        partition = partition_of_plan(problem, cluster)
    if (law := law_for(state)) is not None and simulates(partition):
        return _simulated(problem, partition, law, cluster.schedule)
    stages = {
        problem.devices[each.device].name: [
            *_series(each.computes, each.compute_s),
            *_series(each.hops, each.hop_s, sends=True),
        ]
        for each in timeline(problem, partition)
    }
    if cluster.uplink and state.uplink and run.option("strategy.uplink") != "after":
        sent_s = state.uplink.activation_share * cluster.uplink.upload_s / request.local_steps
        later = stages_after_encoder(problem, partition, sent_s)
        stages |= {each.name: _series(each.starts, each.each_s) for each in later}
    return stages


def _series(begins: Sequence[float], each_s: float, *, sends: bool = False) -> list[PlannedTime]:
    return [PlannedTime("", i, begin, begin + each_s, sends) for i, begin in enumerate(begins)]


def _simulated(
    problem: ClusterProblem, partition: Partition, law: StepLaw, schedule: str
) -> Stages:
    law = law.with_micro_batches(partition.num_micro_batches)
    names = "embedding", *(device.name for device in problem.devices), "head"
    # by number in pipeline order, which is the order of the problem's devices
    stages = defaultdict[str, list[PlannedTime]](list)
    ran, answered_s = play(law, works_in(partition, problem, law), schedule), 0.0
    for key, (begin_s, end_s) in ran.items():
        if key[0] == "pass":  # the control unit, which is no stage here
            continue
        match key:  # an action, or the sending of its output
            case (*sends, int(stage), str(kind), int(i)):
                since_s = begin_s
                if stage == len(names) - 2 and kind == BACKWARD and not sends:  # the head's answer
                    since_s, answered_s = max(ran["head", i][0], answered_s), end_s
                if end_s > since_s:
                    span = since_s * law.factor, end_s * law.factor
                    stages[names[stage + 1]].append(PlannedTime(kind, i, *span, bool(sends)))
    return stages
