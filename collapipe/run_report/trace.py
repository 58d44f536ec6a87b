"""Convert a round on real devices to Chrome trace events, for Perfetto and chrome://tracing.

Each device is a process with tracks for computing, waiting and sending, and for the plan.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pydantic import TypeAdapter

from collapipe.errors import ConfigError
from collapipe.plan import ClusterPlan
from collapipe.process.drawing import own_look
from collapipe.report import DeviceTrace, RoundReport, RoundTraces
from collapipe.run_report.round import planned_stages, read_packed
from collapipe.runs.folder import TRACES
from collapipe.runs.reading import Run, read_run
from pipeline import schedule
from pipeline.schedule import Action

_TRACES = TypeAdapter(RoundTraces)
_LONGEST = 2**28  # of a line, in bytes
COMPUTE, WAIT, SEND, SEND_BACK, PLANNED = range(1, 6)  # tracks
_NAMES = {
    COMPUTE: "compute",
    WAIT: "wait for input",
    SEND: "send activations",
    SEND_BACK: "send gradients",
    PLANNED: "plan: forward and backward",
}
_WIDTH_IN, _ROW_IN, _MARGIN_IN = 9.0, 0.7, 1.3
_LANES = {  # top and height in a row, colour, label
    COMPUTE: (-0.4, 0.34, "#3b6ea5", "computes"),
    WAIT: (-0.4, 0.34, "#dddddd", "waits for its input"),
    SEND: (-0.04, 0.1, "#222222", "sends activations"),
    SEND_BACK: (0.08, 0.1, "#909090", "sends gradients"),
    PLANNED: (0.22, 0.18, "#c98b3a", "the plan"),
}
Event = dict[str, Any]


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
    run = read_run(run_dir)
    traces = _read(run, number)
    line = next((each for each in run.rounds if each.round == traces.round), None)
    if line is None:
        raise ConfigError(f"{run_dir}: metrics.jsonl has no round {traces.round}")
    errors = [each.error_s for devices in traces.units.values() for each in devices]
    return Trace(traces.round, list(_events(run, line, traces)), 2 * max(errors, default=0.0))


def write_trace(trace: Trace, file: Path) -> None:
    """Write the events as JSON. Raises ``ConfigError`` if the file exists or cannot be written."""
    tree = {"traceEvents": trace.events, "displayTimeUnit": "ms"}
    try:
        with file.open("x", encoding="utf-8") as stream:
            json.dump(tree, stream)
    except FileExistsError as error:
        raise ConfigError(f"{file}: exists; remove it, or set --output") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror})") from error


def _events(run: Run, line: RoundReport, traces: RoundTraces) -> Iterator[Event]:
    """Yield the events of all units of a round."""
    process = 0
    for cluster in line.plan.clusters:
        traced, flow = traces.units.get(cluster.unit, ()), f"unit {cluster.unit}"
        planned = planned_stages(run, line, cluster)
        segments = [each for each in traced if each.stage == "segment"]
        start_s = min((each.steps[0][0][1] for each in traced if any(each.steps)), default=0.0)
        for device in traced:
            process += 1
            own = device.stage == "segment"
            called = device.name if own else f"{device.name}, {device.stage}"
            yield from _named(process, f"{run.called(cluster.unit)}, {called}")
            stage = segments.index(device) if own else len(segments) * (device.stage == "head")
            stages = len(segments) + (device.stage == "embedding")  # as ``schedule.embedding``
            lists = [_actions(cluster, stages, stage, len(each)) for each in device.steps]
            yield from _measured(process, device, lists)
            if own:
                yield from _flows(process, flow, stage, len(segments), device, lists)
            for label, begin_s, length_s in planned.get(called if own else device.stage, ()):
                yield _slice(process, PLANNED, label, start_s + begin_s, length_s)


def _read(run: Run, number: int | None) -> RoundTraces:
    """Read the traces of a round. Raises ``ConfigError`` if they are missing or damaged."""
    file, found = run.folder / TRACES, None
    if not file.exists():
        raise ConfigError(
            f"{run.folder}: has no {TRACES}; runs on real devices (cluster=devices) write one"
        )
    with suppress(EOFError):  # the run is still writing
        for each in read_packed(run, file, _TRACES, number, _LONGEST):
            found = each
    if found is None:
        raise ConfigError(f"{file}: has no round {number}; leave --round out for the last one")
    return found


def _actions(cluster: ClusterPlan, stages: int, stage: int, rows: int) -> Sequence[Action]:
    """Return the actions that the rows of a step belong to."""
    each = len(schedule.build(cluster.schedule, stages, 1)[stage])
    return schedule.build(cluster.schedule, stages, rows // each)[stage] if rows % each == 0 else ()


def _measured(
    process: int, device: DeviceTrace, lists: Sequence[Sequence[Action]]
) -> Iterator[Event]:
    for step, (rows, actions) in enumerate(zip(device.steps, lists, strict=True)):
        free_s = {SEND: -math.inf, SEND_BACK: -math.inf}  # one at a time leaves
        for (asked, began, ended, sent), action in zip(rows, actions, strict=False):
            name, about = str(action), {"step": step}
            yield _slice(process, WAIT, f"for {name}", asked, began - asked) | {"args": about}
            yield _slice(process, COMPUTE, name, began, ended - began) | {"args": about}
            track = SEND if action.kind == schedule.FORWARD else SEND_BACK
            leaves = max(ended, free_s[track])
            yield _slice(process, track, name, leaves, sent - leaves) | {"args": about}
            free_s[track] = sent


def _flows(
    process: int,
    flow: str,
    stage: int,
    stages: int,
    device: DeviceTrace,
    lists: Sequence[Sequence[Action]],
) -> Iterator[Event]:
    """Yield an arrow from each action to the neighbour's action that depends on it."""
    for step, (rows, actions) in enumerate(zip(device.steps, lists, strict=True)):
        for (_, began, ended, _), action in zip(rows, actions, strict=False):
            places = (stage, stage + 1) if action.kind == schedule.FORWARD else (stage + 1, stage)
            ends = ({"ph": "f", "bp": "e", "ts": began * 1e6}, {"ph": "s", "ts": ended * 1e6})
            for place, end in zip(places, ends, strict=True):
                if 0 < place < stages:
                    about = {"cat": "hop", "name": str(action), "pid": process, "tid": COMPUTE}
                    yield {**about, **end, "id": f"{flow} {step} {action} {place}"}


def _named(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for track, its in _NAMES.items():
        about = {"ph": "M", "name": "thread_name", "pid": process, "tid": track}
        yield about | {"args": {"name": its}}


def _slice(process: int, track: int, name: str, begin_s: float, length_s: float) -> Event:
    at = {"ts": begin_s * 1e6, "dur": max(0.0, length_s) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **at}


@own_look()
def draw(events: Iterable[Event], title: str, file: Path) -> None:
    """Draw the last step of ``events``, with the planned step aligned to it.

    Raises ``ConfigError`` if the file cannot be written, or does not end in .svg or .png.
    """
    events = list(events)
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    figure = Figure((_WIDTH_IN, _ROW_IN * len(names) + _MARGIN_IN), layout="constrained")
    axes = figure.subplots()
    for each, begin in _last_step([each for each in events if each["ph"] == "X"]):
        top, height, color, _ = _LANES[each["tid"]]
        lane = list(names).index(each["pid"]) + top, height
        bar = (each["ts"] - begin) / 1e6, each["dur"] / 1e6
        axes.broken_barh([bar], lane, facecolors=color, edgecolors="white", linewidth=0.4)
    axes.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in names.values()])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("time from the beginning of the step [s]")
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patches = [Patch(facecolor=color, label=label) for _, _, color, label in _LANES.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    try:
        figure.savefig(file, dpi=160)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}: {error}; name a .svg or .png file") from error


def _last_step(slices: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Return the slices of the last step and of the plan, each with its start time."""
    begins: dict[int, float] = {}
    for each in slices:
        if each["tid"] == WAIT:  # the first thing in a step
            step = each["args"]["step"]
            begins[step] = min(each["ts"], begins.get(step, math.inf))
    last = max(begins, default=0)
    for each in slices:
        if each["tid"] == PLANNED:
            yield each, begins[0]
        elif each["args"]["step"] == last:
            yield each, begins[last]
