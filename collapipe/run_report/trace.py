"""Convert a round on real devices to Chrome trace events, for Perfetto and chrome://tracing.

Each stage is a process with tracks for computing, waiting and sending, measured and planned.
Sending ends when a waiting neighbour has the output, or if no neighbour waits, when it has left.
"""

import json
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pydantic import TypeAdapter

from collapipe.errors import ConfigError
from collapipe.formatting import seconds
from collapipe.plan import ClusterPlan
from collapipe.process.drawing import name_rows, own_look, save_plot
from collapipe.process.files import PUBLIC, write_new
from collapipe.report import DeviceTrace, RoundReport, RoundTraces
from collapipe.run_report.packed import read_packed, request_of
from collapipe.run_report.planned_step import planned_step
from collapipe.runs.folder import TRACES
from collapipe.runs.reading import Run, read_run
from pipeline import schedule
from pipeline.schedule import Action

_TRACES = TypeAdapter(RoundTraces)
_LONGEST = 2**28  # of a line, in bytes
COMPUTE, WAIT, SEND, SEND_BACK, PLANNED, PLANNED_SEND, PLANNED_SEND_BACK = range(1, 8)  # tracks
_REPEATS = 20  # times as fast as the slowest step is a head that repeats its answers
_WIDTH_IN, _ROW_IN, _MARGIN_IN = 9.0, 0.8, 1.5
_LANES = {  # name, and in a picture its top and height in a row and its colour
    COMPUTE: ("compute", -0.44, 0.3, "#3b6ea5"),
    WAIT: ("wait for input", -0.44, 0.3, "#dddddd"),
    SEND: ("send activations", -0.11, 0.09, "#222222"),
    SEND_BACK: ("send gradients", -0.02, 0.09, "#909090"),
    PLANNED: ("plan: compute", 0.12, 0.18, "#c98b3a"),
    PLANNED_SEND: ("plan: send activations", 0.31, 0.06, "#6b4410"),
    PLANNED_SEND_BACK: ("plan: send gradients", 0.38, 0.06, "#dfae73"),
}
Event = dict[str, Any]
Table = Mapping[Action, tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class Trace:
    """A round's events, and the largest difference between devices' clocks in seconds."""

    round: int
    events: list[Event]
    error_s: float


def read_trace(run_dir: Path, number: int | None) -> Trace:
    """Read the trace of a round; None: of the last one.

    Raises ``ConfigError`` if the run has no such round on real devices.
    """
    run, file = read_run(run_dir), run_dir / TRACES
    if not file.exists():
        raise ConfigError(
            f"{run_dir}: has no {TRACES}; rounds of runs on real devices (cluster=devices) write it"
            if run.rounds
            else f"{run_dir}: no round has finished yet"
        )
    found = deque(read_packed(run, TRACES, _TRACES, _LONGEST, number), maxlen=1)
    if not found:
        if number is None:
            raise ConfigError(
                f"{file}: has no whole round: the first is being written, or the file is cut off"
            )
        raise ConfigError(f"{file}: has no round {number}; leave --round out for the last one")
    (traces,) = found
    line = next((each for each in run.rounds if each.round == traces.round), None)
    if line is None:
        raise ConfigError(f"{run_dir}: metrics.jsonl lacks round {traces.round}; set --round")
    errors = [each.error_s for devices in traces.units.values() for each in devices]
    return Trace(traces.round, list(_events(run, line, traces)), 2 * max(errors, default=0.0))


def write_trace(trace: Trace, file: Path) -> None:
    """Write the events as JSON. Raises ``ConfigError`` if the file exists or cannot be written."""
    tree = {"traceEvents": trace.events, "displayTimeUnit": "ms"}
    write_new(file, json.dumps(tree).encode(), PUBLIC)


def _on_server(run: Run, cluster: ClusterPlan) -> bool:
    """Whether the server trains the cluster's head, over the decoder link."""
    if chosen := cluster.uplink.head if cluster.uplink else None:
        return chosen == "server"
    return not run.option("framework.unsplit") and run.option("decoder.mode") != "control_unit"


def _events(run: Run, line: RoundReport, traces: RoundTraces) -> Iterator[Event]:
    first, request = 1, request_of(run, line.round)
    for cluster in line.plan.clusters:
        traced = traces.units.get(cluster.unit, ())
        kept = not cluster.segments or _is_planned(cluster, traced)
        planned = planned_step(run, request, cluster) if request and kept else {}
        start_s = min((each.steps[0][0][1] for each in traced if any(each.steps)), default=0.0)
        tables = dict[tuple[int, int], Table]()
        stages, last = _stage_numbers(cluster, traced)
        numbers = dict(enumerate(stages, first))
        for process, device in enumerate(traced, first):
            own = device.stage == "segment"
            called = device.name if own else f"{device.name}, {device.stage}"
            if device.stage == "head" and _on_server(run, cluster):
                called = "head on the server"
            yield from _named(process, f"{run.called(cluster.unit)}, {called}")
            for step, rows in enumerate(_tables(cluster.schedule, device, numbers[process], last)):
                tables[process, step] = rows
            for each in planned.get(called if own else device.stage, ()):
                back = PLANNED_SEND_BACK if each.kind == schedule.BACKWARD else PLANNED_SEND
                track = back if each.sends else PLANNED
                label = _label(each.kind, each.micro_batch)
                span_s = start_s + each.begin_s, start_s + each.end_s
                yield _slice(process, track, label, *span_s, {"unit": cluster.unit})
        yield from _measured(tables, numbers, cluster.unit, _repeated(traced))
        first += len(traced)


def _is_planned(cluster: ClusterPlan, traced: Sequence[DeviceTrace]) -> bool:
    """Whether the traced steps ran on the plan's devices; if a device was lost, they did not."""
    names = {each.name for each in traced if each.stage == "segment"}
    return names == {name for each in cluster.segments for name in each.devices}


def _repeated(traced: Sequence[DeviceTrace]) -> set[int]:
    """Return the steps that were computed again after a loss: their heads only repeat answers."""
    heads = (each.steps for each in traced if each.stage == "head")
    busy_s = [sum(ended - began for _, began, ended, _ in rows) for rows in next(heads, ())]
    least_s = max(busy_s, default=0.0) / _REPEATS
    return {step for step, each in enumerate(busy_s) if each < least_s}


def _stage_numbers(cluster: ClusterPlan, traced: Sequence[DeviceTrace]) -> tuple[list[int], int]:
    """Return the number of each traced stage, 0 of the embedding, and the head's, the last one.
    Devices that share a segment have the same number, unless the round's plan changed."""
    segments = [each.devices for each in cluster.segments]
    if not _is_planned(cluster, traced):
        segments = [(each.name,) for each in traced if each.stage == "segment"]
    numbers = {name: number for number, each in enumerate(segments, 1) for name in each}
    ends, last = {"embedding": 0, "head": len(segments) + 1}, len(segments) + 1
    return [ends[e.stage] if e.stage in ends else numbers[e.name] for e in traced], last


def _tables(kind: str, device: DeviceTrace, number: int, last: int) -> Iterator[Table]:
    """Yield each step's actions with their times, of stage ``number`` of 0 … ``last``."""
    stages = last - (number > 0)  # the embedding is a stage of its own schedule
    stage = max(0, number - 1)
    each = len(schedule.build(kind, stages, 1)[stage])
    for rows in device.steps:
        m = len(rows) // each if len(rows) % each == 0 else 0
        yield dict(zip(schedule.build(kind, stages, m)[stage], rows, strict=False))


def _measured(
    tables: Mapping[tuple[int, int], Table],
    numbers: Mapping[int, int],
    unit: int,
    repeated: Collection[int],
) -> Iterator[Event]:
    """Yield the slices of each process and step, and an arrow to each action of a neighbour that
    needs an output. ``numbers`` are the processes' stages. Slices of ``repeated`` steps are
    marked."""
    for (process, step), rows in tables.items():
        free_s = {SEND: -math.inf, SEND_BACK: -math.inf}  # one at a time leaves
        about = {"unit": unit, "step": step, "repeated": step in repeated}
        for action, (wanted, began, ended, left) in rows.items():
            name, arrivals = _label(action.kind, action.micro_batch), list[float]()
            yield _slice(process, WAIT, f"for {name}", wanted, began, about)
            yield _slice(process, COMPUTE, name, began, ended, about)
            track, way = (SEND, 1) if action.kind == schedule.FORWARD else (SEND_BACK, -1)
            near = (k for k, number in numbers.items() if number == numbers[process] + way)
            for neighbour in (k for k in near if action in tables.get((k, step), ())):
                waits, takes, *_ = tables[neighbour, step][action]
                arrivals.append(takes if waits < ended else left)
                place = f"{process} {neighbour} {step} {name}"
                arrow = {"cat": "hop", "name": name, "tid": COMPUTE, "id": place}
                yield {**arrow, "ph": "s", "pid": process, "ts": ended * 1e6}
                yield {**arrow, "ph": "f", "bp": "e", "pid": neighbour, "ts": takes * 1e6}
            leaves, sent = max(ended, free_s[track]), max(arrivals, default=left)
            yield _slice(process, track, name, leaves, sent, about)
            free_s[track] = max(leaves, sent)


def _label(kind: str, micro_batch: int) -> str:
    return f"{kind}{micro_batch + 1}"  # users count micro-batches from 1


def _named(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for track, (its, *_) in _LANES.items():
        about = {"ph": "M", "name": "thread_name", "pid": process, "tid": track}
        yield about | {"args": {"name": its}}


def _slice(
    process: int, track: int, name: str, begin_s: float, end_s: float, about: Mapping[str, Any]
) -> Event:
    at = {"ts": begin_s * 1e6, "dur": max(0.0, end_s - begin_s) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **at, "args": about}


@own_look()
def draw(trace: Trace, file: Path) -> None:
    """Draw each unit's step with the median length, and the planned step aligned to it.

    Raises ``ConfigError`` if the file cannot be written, or does not end in .svg or .png.
    """
    named = (each for each in trace.events if each["name"] == "process_name")
    names = {each["pid"]: each["args"]["name"] for each in named}
    spans = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    figure = Figure((_WIDTH_IN, _ROW_IN * len(names) + _MARGIN_IN), layout="constrained")
    axes = figure.subplots()
    for each, begin in _typical_step(each for each in trace.events if each["ph"] == "X"):
        _, top, height, color = _LANES[each["tid"]]
        lane = list(names).index(each["pid"]) + top, height
        bar = (each["ts"] - begin) / 1e6, each["dur"] / 1e6
        spans[each["pid"], each["tid"]].append((bar[0], sum(bar)))
        axes.broken_barh(
            [bar],
            lane,
            facecolors=color,
            edgecolors="white",
            linewidth=0.4,
            zorder=1 if each["tid"] == WAIT else 2,  # a head may wait while it computes
        )
    busy = {where: seconds(covered(each)) for where, each in spans.items()}
    labels = [
        f"{name}\n{busy.get((pid, COMPUTE), seconds(0))}, "
        + (f"planned {busy[pid, PLANNED]}" if (pid, PLANNED) in busy else "no plan")
        for pid, name in names.items()
    ]
    name_rows(axes, labels, f"a step of round {trace.round}, of median length")
    axes.set_xlim(left=0)
    axes.set_xlabel("time from the beginning of the step [s]")
    patches = [Patch(facecolor=color, label=label) for label, *_, color in _LANES.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
    save_plot(figure, file)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time in at least one span: a head may get a submission while it computes."""
    total_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def _typical_step(slices: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield the slices of each unit's step with the median length and of its plan, each with the
    start time of its step. Steps that were computed again after a loss are left out."""
    steps = defaultdict[tuple[int, int | None], list[Event]](list)  # without a step: the plan
    for each in slices:
        about = each["args"]
        if not about.get("repeated"):
            steps[about["unit"], about.get("step")].append(each)
    begins = {step: min(each["ts"] for each in own) for step, own in steps.items()}
    ends = {step: max(each["ts"] + each["dur"] for each in own) for step, own in steps.items()}
    for unit in sorted({unit for unit, _ in steps}):
        own = [key for key in steps if key[0] == unit and key[1] is not None]
        lengths = [(ends[key] - begins[key], key) for key in own]
        for key in ((unit, None), median_low(lengths)[1]) if lengths else ():
            yield from ((each, begins[key]) for each in steps[key])
