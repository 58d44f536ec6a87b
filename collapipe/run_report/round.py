"""Show a round's plan: Gantt charts of its units and of a local step."""

from collapipe.formatting import seconds, three_digits
from collapipe.plan import ClusterPlan
from collapipe.report import ClusterCost, RoundReport
from collapipe.run_report.charts import QUIET, Kind, Row, rows, stacked
from collapipe.run_report.html import Markup, join, note, table
from collapipe.run_report.packed import request_of
from collapipe.run_report.planned_step import planned_step
from collapipe.runs.folder import REQUESTS
from collapipe.runs.reading import Run
from collapipe.state import ROUNDING

_STEM = Kind("frozen stem", "c3")
_PIPELINE = Kind("pipeline, all local steps", "c0")
_UPLOAD = Kind("upload, after the pipeline", "c1", 0.25, 0.5)
_ODD = Kind("odd micro-batch", "c0", 0, 0.75)
_EVEN = Kind("even micro-batch", "c0", 0, 0.75, 0.5)
_SENT = Kind("hop to the next stage", QUIET, 0.8, 0.2)


def gantt(run: Run, line: RoundReport) -> Markup:
    """Show the modelled times at which units compute and send in a round, one row per unit."""
    bars, cells, costs, early = [], [], line.costs, False
    for cluster in line.plan.clusters:
        name, cost, uplink = run.called(cluster.unit), costs.get(cluster.unit), cluster.uplink
        pipeline_s, upload_s, ends_s = _times(cluster, cost)
        stem_s, rest_s = cost.stem_s if cost else 0.0, None
        if pipeline_s is not None and upload_s is not None:
            rest_s = ends_s - stem_s - pipeline_s
            early |= rest_s < upload_s * (1 - ROUNDING)
        timed = ((_STEM, stem_s or None), (_PIPELINE, pipeline_s), (_UPLOAD, rest_s))
        parts = [(kind, value) for kind, value in timed if value is not None]
        if parts:
            failed = ", failed" if cluster.unit in line.failures else ""
            bars.append(stacked(name, parts, seconds(ends_s) + failed))
        columns = {
            "unit": name,
            "segments": " + ".join(f"{s.span.blocks} {s.holders}" for s in cluster.segments) or "–",
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
    during = "Uploads of activations begin during the pipeline, so both take less than their sum."
    without = not all(cluster.uplink for cluster in line.plan.clusters)
    figures = table([*columns], cells, "The round's plan")
    notes = note(missing) if without else None, note(during) if early else None
    return join(chart, figures, *notes)


def _times(
    cluster: ClusterPlan, cost: ClusterCost | None
) -> tuple[float | None, float | None, float]:
    """Return modelled or planned seconds of pipeline, of upload, and until both are done."""
    if cost:
        return cost.pipeline_s, cost.upload_s, cost.ends_s
    pipeline_s, uplink = cluster.latency_s, cluster.uplink
    if uplink is None:
        return pipeline_s, None, pipeline_s or 0.0
    return pipeline_s, uplink.upload_s, uplink.finish_s


def step_chart(run: Run, line: RoundReport) -> Markup:
    """Return the chart of a local step: one row per participating device and other stage.

    It is a note if the file of requests was deleted. Raises ``ConfigError`` if it is damaged.
    """
    request = request_of(run, line.round)
    if request is None:
        return note(f"No local step is drawn: {REQUESTS} is missing.")
    drawn = []
    for cluster in line.plan.clusters:
        for stage, times in planned_step(run, request, cluster).items():
            kinds = (_SENT if each.sends else (_ODD, _EVEN)[each.micro_batch % 2] for each in times)
            spans = ((each.begin_s, each.end_s) for each in times)
            drawn.append(
                Row(f"{run.called(cluster.unit)}, {stage}", [*zip(kinds, spans, strict=True)])
            )
    title = f"A local step of round {line.round}, modelled"
    return rows(title, "seconds from the step's beginning", drawn, wide=True)
