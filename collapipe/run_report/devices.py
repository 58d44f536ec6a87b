"""Measurements of real devices: predicted and measured seconds, waiting times, and events."""

from collections.abc import Iterator

from collapipe.errors import ConfigError, printable
from collapipe.formatting import amount, seconds
from collapipe.report import DeviceReport, RoundReport
from collapipe.run_report.charts import Kind, Series, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, join, note, table
from collapipe.run_report.round import planned_stages
from collapipe.runs.reading import Run

_COMPUTES = Kind("computes", "c0")
_WAITS = Kind("waits for its neighbours", "c1", 0.25, 0.5)


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
        stacked(f"{run.called(unit)}, {each.name}", _parts(each), seconds(each.span_s))
        for unit, reports in last.devices.items()
        for each in reports
    ]
    across = "seconds of the round in which a step was under way, measured"
    chart = rows(f"Who waits for whom in round {last.round}", across, bars, wide=True)
    return join(_pipelines(run), chart, told, *_events(run))


def _pipelines(run: Run) -> Markup:
    """Show measured and planned seconds of each unit's batches."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in run.rounds:
        for unit, measured_s in line.pipeline_s.items():
            who = run.called(unit)
            found.setdefault(f"{who}, measured", []).append((line.round, measured_s))
            if cost := line.costs.get(unit):
                found.setdefault(f"{who}, planned", []).append((line.round, cost.pipeline_s))
    series = [Series(name, style, points) for style, (name, points) in enumerate(found.items())]
    return charts(lines("Pipelines of real devices", "round", "s", series, zero=True))


def _cells(run: Run, line: RoundReport) -> Iterator[list[object]]:
    for cluster in line.plan.clusters:
        planned = _planned(run, line, cluster.unit)
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


def _planned(run: Run, line: RoundReport, unit: int) -> dict[str, float]:
    """Return the planned seconds of a micro-batch on each device."""
    cluster = next(each for each in line.plan.clusters if each.unit == unit)
    try:
        return {name: times.compute_s for name, times in planned_stages(run, line, cluster)}
    except (ConfigError, EOFError):  # the page then has only the measured seconds
        return {}


def _parts(each: DeviceReport) -> list[tuple[Kind, float]]:
    return [(_COMPUTES, each.compute_s), (_WAITS, each.wait_s)]


def _events(run: Run) -> Iterator[Markup]:
    for line in run.rounds:
        for unit, events in line.events.items():
            for event in events:
                yield note(f"Round {line.round}, {run.called(unit)}: {printable(event)}")
