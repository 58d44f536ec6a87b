"""One local step of a round: what each device computes and sends when, as it was modelled."""

import gzip
import zlib
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from collapipe.errors import ConfigError, printable
from collapipe.plan import ClusterPlan
from collapipe.run_report.drawing import (
    BOTTOM,
    LETTER,
    RIGHT,
    WIDE,
    colour,
    figure,
    fitting,
    floor_axis,
    key,
    legend,
    picture,
    text_at,
)
from collapipe.run_report.markup import Markup, join, tag
from collapipe.run_report.scale import Scale, scale
from collapipe.runs.metrics import RoundLine
from collapipe.runs.reading import Run, option
from optim.cluster_plan import cluster_problem
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterProblem, Latency, Partition
from optim.timeline import Stage, timeline

_REQUESTS = "requests.jsonl.gz"  # of a run's folder
_LONGEST = 2**26  # of lines, in bytes; a thousand units of a dozen devices take a tenth
_ROW, _BAR, _HOP = 22.0, 12.0, 3.0
_ODD, _EVEN, _SENT = f"fill {colour(0)}", f"fill {colour(0)} even", "hop"
_NAMES = {_ODD: "odd micro-batch", _EVEN: "even micro-batch", _SENT: "hop to the next device"}
Row = tuple[str, Stage]


def step_chart(run: Run, line: RoundLine) -> Markup | None:
    """A row a device that takes part; None where what was planned from is not known.

    Raises ``ConfigError`` where the file of it is damaged.
    """
    place = [each.round for each in run.rounds].index(line.round)
    request = _request(run.folder / _REQUESTS, line.round, place + 1)
    if request is None or not line.plan.clusters:
        return None
    law = option(run, "strategy.latency")
    latency = cast(Latency, law if law in LATENCIES else "overlap")  # as rounds are accounted
    rows = [row for cluster in line.plan.clusters for row in _rows(request, cluster, latency)]
    title = f"A local step of round {line.round}, modelled"
    return figure(title, _drawn(title, rows), legend(_samples()), wide=True)


def _request(file: Path, number: int, most: int) -> RoundRequest | None:
    """What the round was planned from; it is in the first ``most`` lines.

    A small file may unpack to a line that no memory holds, or to lines without end.
    """
    if not file.is_file():
        return None
    beginning = b'{"round":%d,' % number
    try:
        with gzip.open(file) as lines:
            for text in islice(iter(partial(lines.readline, _LONGEST), b""), most):
                if len(text) == _LONGEST:
                    raise OSError("a line without end")
                if text.startswith(beginning):
                    return TypeAdapter(RoundRequest).validate_json(text)
    except EOFError:  # the end is being written
        return None
    except (OSError, zlib.error, ValidationError) as error:
        why = printable(str(error).partition("\n")[0])
        raise ConfigError(f"{file}: round {number}: not what a run writes ({why})") from error
    return None


def _rows(request: RoundRequest, cluster: ClusterPlan, latency: Latency) -> list[Row]:
    states = {state.unit: state for state in request.clusters}
    if cluster.unit not in states:
        raise ConfigError(f"round {request.round}: {_REQUESTS} does not know unit {cluster.unit}")
    problem = cluster_problem(request, states[cluster.unit], latency)
    if cluster.segments:
        problem = _in_order(problem, cluster)
    blocks = tuple(segment.span.blocks for segment in cluster.segments)
    partition = Partition(blocks, cluster.num_micro_batches, 0.0, replicated=not blocks)
    return [
        (f"unit {cluster.unit}, {problem.devices[stage.device].name}", stage)
        for stage in timeline(problem, partition)
    ]


def _in_order(problem: ClusterProblem, cluster: ClusterPlan) -> ClusterProblem:
    """With the devices that hold a segment, as activations pass them."""
    known = {device.name: device for device in problem.devices}
    names = [segment.device for segment in cluster.segments]
    if missing := set(names) - set(known):
        raise ConfigError(
            f"unit {cluster.unit}: {_REQUESTS} does not know its devices {', '.join(missing)}"
        )
    return ClusterProblem(
        tuple(known[name] for name in names),
        problem.num_blocks,
        problem.batch_size,
        problem.max_micro_batches,
        problem.latency,
    )


def _drawn(title: str, rows: list[Row]) -> Markup:
    left = min(0.4 * WIDE, 14 + LETTER * max(len(name) for name, _ in rows))
    ends = [stage.hops[-1] + stage.hop_s for _, stage in rows]
    floor = 8 + _ROW * len(rows)
    horizontal = scale([0.0, *ends], left, WIDE - RIGHT, count=8)
    drawn = [
        _stage(name, stage, 8 + _ROW * number, horizontal)
        for number, (name, stage) in enumerate(rows)
    ]
    axis = floor_axis(horizontal, floor, "seconds from the step's beginning")
    return picture(title, WIDE, floor + BOTTOM, *drawn, axis)


def _stage(name: str, stage: Stage, top: float, horizontal: Scale) -> Markup:
    boxes = {
        _ODD: [(start, stage.compute_s) for start in stage.computes[::2]],
        _EVEN: [(start, stage.compute_s) for start in stage.computes[1::2]],
        _SENT: [(start, stage.hop_s) for start in stage.hops if stage.hop_s > 0],
    }
    paths = [
        tag("path", d="".join(_box(span, top, kind, horizontal) for span in spans), class_=kind)
        for kind, spans in boxes.items()
    ]
    shown = fitting(name, horizontal.begin - 8)
    return join(text_at(horizontal.begin - 8, top + 13, shown, "end"), *paths)


def _box(span: tuple[float, float], top: float, kind: str, horizontal: Scale) -> str:
    """Hops lie beneath what is computed."""
    begin, end = horizontal.at(span[0]), horizontal.at(span[0] + span[1])
    y, tall = (top + 3 + _BAR, _HOP) if kind == _SENT else (top + 3, _BAR)
    return f"M{begin:.1f} {y:g}H{end:.1f}v{tall:g}H{begin:.1f}z"


def _samples() -> list[tuple[str, Markup]]:
    boxes = {_ODD: "M2 1h24v10h-24z", _EVEN: "M2 1h24v10h-24z", _SENT: "M2 4h24v3h-24z"}
    return [(_NAMES[kind], key(tag("path", d=box, class_=kind))) for kind, box in boxes.items()]
