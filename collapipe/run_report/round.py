"""Show a round: Gantt charts of its units and of a local step, and what real devices measured."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from collapipe.errors import ConfigError, printable
from collapipe.formatting import amount, seconds, three_digits
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterCost, RoundReport
from collapipe.run_report.charts import QUIET, Kind, Row, Series, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, join, note, table
from collapipe.runs.folder import REQUESTS
from collapipe.runs.reading import Run
from collapipe.state import ClusterState
from collapipe.step_law import interval
from optim.cluster_plan import as_planned, cluster_problem
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterProblem, Latency, Partition
from optim.simulated_plan import law_for, simulates, works_in
from optim.step import play
from optim.timeline import stages_behind, timeline

T = TypeVar("T")
_STEM = Kind("frozen stem", "c3")
_PIPELINE = Kind("pipeline, all local steps", "c0")
_UPLOAD = Kind("upload, after the pipeline", "c1", 0.25, 0.5)
_STREAMED = Kind("upload, head, gradients", "c1", 0, 0.75)
_REQUEST = TypeAdapter(RoundRequest)
_LONGEST = 2**26  # of a line, in bytes; a thousand units of a dozen devices need a tenth
_ODD = Kind("odd micro-batch", "c0", 0, 0.75)
_EVEN = Kind("even micro-batch", "c0", 0, 0.75, 0.5)
_COMPUTES = Kind("computes", "c0")
_WAITS = Kind("waits for its neighbours", "c1", 0.25, 0.5)
_WAITS_CONTROL_UNIT = Kind("waits for the control unit or its head", "c2", 0.25, 0.5)
_IDLE = Kind("between actions", QUIET, 0.4, 0.2)
_SENT = Kind("hop to the next device", QUIET, 0.8, 0.2)


def gantt(run: Run, line: RoundReport) -> Markup:
    """Show the modelled times at which units compute and send in a round, one row per unit."""
    bars, cells, costs = [], [], line.costs
    for cluster in line.plan.clusters:
        name, cost, uplink = run.called(cluster.unit), costs.get(cluster.unit), cluster.uplink
        pipeline_s, upload_s, ends_s = _times(cluster, cost)
        stem_s, rest_s = cost.stem_s if cost else 0.0, None
        if pipeline_s is not None and upload_s is not None:
            rest_s = ends_s - stem_s - pipeline_s
        timed = ((_STEM, stem_s or None), (_PIPELINE, pipeline_s), (_UPLOAD, rest_s))
        parts = [(kind, value) for kind, value in timed if value is not None]
        if parts:
            failed = ", failed" if cluster.unit in line.failures else ""
            bars.append(stacked(name, parts, seconds(ends_s) + failed))
        columns = {
            "unit": name,
            "segments": " + ".join(f"{s.span.blocks} {s.device}" for s in cluster.segments) or "–",
            "S": len(cluster.segments) or "–",
            "m": cluster.num_micro_batches,
            "pipeline": "–" if pipeline_s is None else seconds(pipeline_s),
            "channel": uplink.channel if uplink else "–",
            "power": f"{three_digits(uplink.power_w)} W" if uplink else "–",
            "upload": "–" if upload_s is None else seconds(upload_s),
            "ends after": "–" if pipeline_s is None else seconds(ends_s),
        }
        cells.append([*columns.values()])
    title, across = f"Round {line.round}, modelled", "seconds from the round's beginning"
    chart = rows(title, across, bars, wide=True) if bars else note(f"{title}: no times are known.")
    missing = (
        "Uploads not counted: the strategy planned no channel for them, and the round's modelled "
        "delay is that of the pipelines alone."
    )
    without = not all(cluster.uplink for cluster in line.plan.clusters)
    told = table([*columns], cells, "The round's plan")
    return join(chart, told, note(missing) if without else None)


def _times(
    cluster: ClusterPlan, cost: ClusterCost | None
) -> tuple[float | None, float | None, float]:
    """Return modelled or planned seconds of pipeline, of upload, and until both are done."""
    if cost:
        return cost.pipeline_s, cost.upload_s, cost.ends_s
    pipeline_s, uplink = cluster.latency_s, cluster.uplink
    if uplink is None:
        return pipeline_s, None, pipeline_s or 0.0
    both_s = (pipeline_s or 0.0) + uplink.upload_s
    return pipeline_s, uplink.upload_s, both_s if uplink.finish_s is None else uplink.finish_s


def step_chart(run: Run, line: RoundReport) -> Markup | None:
    """Return the chart of a local step: one row per participating device and later stage.

    None if the round's request was not recorded. Raises ``ConfigError`` if its file is damaged.
    """
    try:
        request = next(read_requests(run, line.round), None)
    except EOFError:
        return None
    if request is None or not line.plan.clusters:
        return None
    latency = _latency(run)
    streamed = run.option("strategy.uplink") != "after"
    drawn = [
        row
        for cluster in line.plan.clusters
        for row in _rows(run, request, cluster, latency, streamed)
    ]
    title = f"A local step of round {line.round}, modelled"
    return rows(title, "seconds from the step's beginning", drawn, wide=True)


def read_requests(run: Run, number: int | None = None) -> Iterator[RoundRequest]:
    """Yield the planners' requests of a run's rounds, or only the request of round ``number``.

    Yields nothing without a file. Raises as ``read_packed``.
    """
    file = run.folder / REQUESTS
    if file.is_file():
        yield from read_packed(run, file, _REQUEST, number, _LONGEST)


def read_packed(
    run: Run, file: Path, kind: TypeAdapter[T], number: int | None, longest: int
) -> Iterator[T]:
    """Yield the lines of a run's compressed file, or only the lines of round ``number``.

    A small file may unpack to a huge line or to endless lines. So a line has less than ``longest``
    bytes, and the number of lines is bounded by the run's rounds. Raises ``EOFError`` while the
    file is still being written and ``ConfigError`` if it is damaged.
    """
    beginning = b"" if number is None else b'{"round":%d,' % number
    try:
        with gzip.open(file) as lines:
            most = len(run.rounds) + 1  # one more, to see the file's end
            for text in islice(iter(partial(lines.readline, longest), b""), most):
                if len(text) == longest:
                    raise OSError("a line without end")
                if text.startswith(beginning):
                    yield kind.validate_json(text)
    except (OSError, zlib.error, ValidationError) as error:
        why = printable(str(error).partition("\n")[0])
        where = f"{file}: " if number is None else f"{file}: round {number}: "
        raise ConfigError(f"{where}not what a run writes ({why})") from error


def _rows(
    run: Run, request: RoundRequest, cluster: ClusterPlan, latency: Latency, streamed: bool
) -> Iterator[Row]:
    """Yield two rows per device, computing and sending by micro-batch, in pipeline order, and the
    rows of the stages after the last device."""
    who = run.called(cluster.unit)
    problem, partition, state = _planned(run, request, cluster, latency)
    if (stages := _simulated(problem, partition, state, cluster.schedule)) is not None:
        for name, times in stages.items():
            micro_batches = [int(label.lstrip("FB")) for label, *_ in times]
            spans = [(begin_s, begin_s + length_s) for _, begin_s, length_s in times]
            kinds = ((_ODD, _EVEN)[number % 2] for number in micro_batches)
            yield Row(f"{who}, {name}", [*zip(kinds, spans, strict=True)])
        return
    for stage in timeline(problem, partition):
        starts = enumerate(stage.computes)
        boxes = [((_ODD, _EVEN)[n % 2], (start, start + stage.compute_s)) for n, start in starts]
        boxes += [(_SENT, (start, start + stage.hop_s)) for start in stage.hops]
        yield Row(f"{who}, {problem.devices[stage.device].name}", boxes)
    if cluster.uplink and state.uplink and streamed:
        sent_s = state.uplink.activation_share * cluster.uplink.upload_s / request.local_steps
        for each in stages_behind(problem, partition, sent_s):
            boxes = [(_STREAMED, (start, start + each.each_s)) for start in each.starts]
            yield Row(f"{who}, {each.name}", boxes)


def planned_stages(
    run: Run, line: RoundReport, cluster: ClusterPlan
) -> dict[str, list[tuple[str, float, float]]]:
    """Return each stage's planned times in a local step: a label, the beginning, and the seconds.

    Stages are ``embedding``, the devices and ``head``, if the plan was simulated with a measured
    law; else only the devices. Empty without the request.
    """
    request = next(read_requests(run, line.round), None)
    if request is None:
        return {}
    problem, partition, state = _planned(run, request, cluster, _latency(run))
    if (stages := _simulated(problem, partition, state, cluster.schedule)) is not None:
        return stages
    return {
        problem.devices[each.device].name: [
            (str(number), begin_s, each.compute_s) for number, begin_s in enumerate(each.computes)
        ]
        for each in timeline(problem, partition)
    }


def _simulated(
    problem: ClusterProblem, partition: Partition, state: ClusterState, schedule: str
) -> dict[str, list[tuple[str, float, float]]] | None:
    """Return the simulated times of each stage, see ``planned_stages``; None without a measured
    law."""
    if (law := law_for(state)) is None or not simulates(law, partition):
        return None
    names = [device.name for device in problem.devices]
    ran = play(law, works_in(partition, problem, law), schedule)
    stages: dict[str, list[tuple[str, float, float]]] = {}
    for key, (begin_s, end_s) in ran.items():
        found = {-1: "embedding", "head": "head"} | dict(enumerate(names))
        if (stage := found.get(key[0])) is not None and end_s > begin_s:
            about = "".join(map(str, key[1:])), begin_s * law.factor
            stages.setdefault(stage, []).append((*about, (end_s - begin_s) * law.factor))
    return stages


def _latency(run: Run) -> Latency:
    law = run.option("strategy.latency")
    return cast(Latency, law if law in LATENCIES else "overlap")  # as rounds are costed


def _planned(
    run: Run, request: RoundRequest, cluster: ClusterPlan, latency: Latency
) -> tuple[ClusterProblem, Partition, ClusterState]:
    who, states = run.called(cluster.unit), {state.unit: state for state in request.clusters}
    if cluster.unit not in states:
        raise ConfigError(f"round {request.round}: {REQUESTS} does not know {who}")
    state = as_planned(states[cluster.unit], cluster.uplink)
    problem = cluster_problem(request, state, latency)
    if cluster.segments:
        known = {device.name: device for device in problem.devices}
        names = [segment.device for segment in cluster.segments]
        if missing := ", ".join(set(names) - set(known)):
            raise ConfigError(f"{who}: {REQUESTS} does not know its devices {missing}")
        problem = replace(problem, devices=tuple(known[name] for name in names))
    blocks = tuple(segment.span.blocks for segment in cluster.segments)
    partition = Partition(blocks, cluster.num_micro_batches, 0.0, replicated=not blocks)
    return problem, partition, state


def devices(run: Run) -> Markup | None:
    """Show the devices of the last round with real ones; None if devices were simulated."""
    measured = [line for line in run.rounds if line.devices]
    if not measured:
        return None
    last = measured[-1]
    titles = (
        *("device", "blocks", "chunk planned", "chunk measured"),
        *("computes", "waits", "sends", "sent", "peak memory"),
    )
    told = table(titles, [*_cells(run, last)], f"Devices in round {last.round}")
    bars = [
        stacked(
            f"{run.called(unit)}, {each.name}",
            [
                (_COMPUTES, each.compute_s),
                (_WAITS, each.wait_s - each.control_unit_wait_s),
                (_WAITS_CONTROL_UNIT, each.control_unit_wait_s),
                (_IDLE, max(0.0, each.span_s - each.compute_s - each.wait_s)),
            ],
            seconds(each.span_s),
        )
        for unit, reports in last.devices.items()
        for each in reports
    ]
    across = "seconds of the round in which a step was under way, measured"
    chart = rows(f"Who waits for whom in round {last.round}", across, bars, wide=True)
    return join(_pipelines(run), chart, told, *_events(run))


def _pipelines(run: Run) -> Markup:
    """Show measured and planned seconds of each unit's batches."""
    found: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for line in run.rounds:
        for unit, measured_s in line.pipeline_s.items():
            who, planned = run.called(unit), f"{run.called(unit)}, planned"
            found.setdefault(f"{who}, measured", []).append((line.round, measured_s))
            if cost := line.costs.get(unit):
                found.setdefault(planned, []).append((line.round, cost.pipeline_s))
                bounds = interval(cost.pipeline_s, cost.spread)
                bands.setdefault(planned, []).append((line.round, *bounds))
    series = [
        Series(name, style, points, band=bands.get(name, ()))
        for style, (name, points) in enumerate(found.items())
    ]
    return charts(lines("Pipelines of real devices", "round", "seconds", series, zero=True))


def _cells(run: Run, line: RoundReport) -> Iterator[list[object]]:
    for cluster in line.plan.clusters:
        planned = _planned_s(run, line, cluster)
        for each in line.devices.get(cluster.unit, ()):
            chunk_s, span_s = planned.get(each.name), each.span_s or 1.0
            yield [
                f"{run.called(cluster.unit)}, {each.name}",
                each.blocks,
                "–" if chunk_s is None else seconds(chunk_s),
                seconds(each.chunk_s),
                f"{each.compute_s / span_s:.0%}",
                f"{each.wait_s / span_s:.0%}",
                f"{each.send_s / span_s:.0%}",
                amount(each.sent_bytes, "B"),
                amount(each.peak_bytes, "B"),
            ]


def _planned_s(run: Run, line: RoundReport, cluster: ClusterPlan) -> dict[str, float]:
    """Return the planned seconds of a micro-batch on each device."""
    try:
        stages, m = planned_stages(run, line, cluster), cluster.num_micro_batches
        return {name: sum(each[2] for each in times) / m for name, times in stages.items()}
    except (ConfigError, EOFError):  # the page then has only the measured seconds
        return {}


def _events(run: Run) -> Iterator[Markup]:
    for line in run.rounds:
        for unit, events in line.events.items():
            for event in events:
                yield note(f"Round {line.round}, {run.called(unit)}: {printable(event)}")
