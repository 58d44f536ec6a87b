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
from collapipe.report import RoundReport
from collapipe.run_report.html import Markup
from collapipe.run_report.rows import Kind, Row, rows
from collapipe.runs.reading import Run
from optim.cluster_plan import cluster_problem
from optim.planner import RoundRequest
from optim.problem import LATENCIES, ClusterProblem, Latency, Partition
from optim.timeline import SegmentTimes, timeline

_REQUESTS = "requests.jsonl.gz"  # of a run's folder
_LONGEST = 2**26  # of lines, in bytes; a thousand units of a dozen devices take a tenth
_ODD = Kind("odd micro-batch", "fill c0", 0, 0.75)
_EVEN = Kind("even micro-batch", "fill c0 even", 0, 0.75)
_SENT = Kind("hop to the next device", "hop", 0.8, 0.2)


def step_chart(run: Run, line: RoundReport) -> Markup | None:
    """A row a device that takes part; None where what was planned from is not known.

    Raises ``ConfigError`` where the file of it is damaged.
    """
    place = [each.round for each in run.rounds].index(line.round)
    request = _request(run.folder / _REQUESTS, line.round, place + 1)
    if request is None or not line.plan.clusters:
        return None
    law = run.option("strategy.latency")
    latency = cast(Latency, law if law in LATENCIES else "overlap")  # as rounds are accounted
    drawn = [row for cluster in line.plan.clusters for row in _rows(request, cluster, latency)]
    title = f"A local step of round {line.round}, modelled"
    return rows(title, "seconds from the step's beginning", drawn, wide=True)


def _request(file: Path, number: int, most: int) -> RoundRequest | None:
    """Read what the round was planned from, in one of the first ``most`` lines.

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
        Row(f"unit {cluster.unit}, {problem.devices[stage.device].name}", _boxes(stage))
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


def _boxes(stage: SegmentTimes) -> list[tuple[Kind, tuple[float, float]]]:
    """What a device computes, micro-batch by micro-batch, and beneath it what it sends."""
    computed = [
        ((_ODD, _EVEN)[number % 2], (start, start + stage.compute_s))
        for number, start in enumerate(stage.computes)
    ]
    return computed + [(_SENT, (start, start + stage.hop_s)) for start in stage.hops]
