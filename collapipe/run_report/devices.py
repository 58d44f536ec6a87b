"""Show what real devices measured in a run, and what was planned."""

from collections.abc import Iterator

from collapipe.errors import printable
from collapipe.formatting import amount, seconds
from collapipe.report import DeviceReport, RoundReport
from collapipe.run_report.charts import QUIET, Kind, Series, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, join, note, table
from collapipe.run_report.packed import request_of
from collapipe.run_report.planned_step import planned_step
from collapipe.runs.reading import Run
from collapipe.step_law import interval

_COMPUTES = Kind("computes", "c0")
_SENDS = Kind("sends", "c2", 0.125, 0.75)
_WAITS = Kind("waits for input", "c1", 0.25, 0.5)
_WAITS_CONTROL_UNIT = Kind("waits for the control unit", "c3", 0.25, 0.5)
_IDLE = Kind("idle", QUIET, 0.4, 0.2)


def devices(run: Run) -> Markup | None:
    """Show the devices of the last round with real ones; None if devices were simulated."""
    last = next((line for line in reversed(run.rounds) if line.devices), None)
    if last is None:
        return None
    bars = [
        stacked(f"{run.called(unit)}, {each.name}", _parts(each), seconds(each.span_s))
        for unit, reports in last.devices.items()
        for each in reports
    ]
    title = f"Where the time of round {last.round}'s steps goes"
    chart = rows(title, "seconds of all steps, measured", bars)
    kinds = (kind.name for kind in (_COMPUTES, _SENDS, _WAITS, _WAITS_CONTROL_UNIT, _IDLE))
    titles = "device", "blocks", "chunk planned", "chunk measured", *kinds, "sent", "peak memory"
    figures = table(titles, [*_cells(run, last)], f"Devices in round {last.round}")
    return join(charts(_pipelines(run), chart), figures, *_events(run))


def _parts(device: DeviceReport) -> list[tuple[Kind, float]]:
    """Return the parts of a device's time, which add up to ``span_s``."""
    known = (
        (_COMPUTES, device.compute_s),
        (_SENDS, device.send_alone_s),
        (_WAITS, device.wait_s - device.control_unit_wait_s),
        (_WAITS_CONTROL_UNIT, device.control_unit_wait_s),
    )
    return [*known, (_IDLE, max(0.0, device.span_s - sum(each_s for _, each_s in known)))]


def _pipelines(run: Run) -> Markup:
    """Show measured and planned seconds of each unit's batches."""
    series = list[Series]()
    for unit in dict.fromkeys(unit for line in run.rounds for unit in line.pipeline_s):
        known = [line for line in run.rounds if unit in line.pipeline_s]
        costs = [(line.round, line.costs[unit]) for line in known if unit in line.costs]
        bands = ((number, cost) for number, cost in costs if cost.spread)
        band = [(number, *interval(cost.pipeline_s, cost.spread)) for number, cost in bands]
        measured = [(line.round, line.pipeline_s[unit]) for line in known]
        planned = [(number, cost.pipeline_s) for number, cost in costs]
        name, style = run.called(unit), len(series)
        series.append(Series(f"{name}, measured", style, measured))
        series.append(Series(f"{name}, planned (interval shaded)", style + 1, planned, band=band))
    return lines("Pipelines, planned and measured", "round", "seconds", series, zero=True)


def _cells(run: Run, line: RoundReport) -> Iterator[list[object]]:
    request = request_of(run, line.round)
    for cluster in line.plan.clusters:
        planned = planned_step(run, request, cluster) if request else {}
        held = {name: each.span.blocks for each in cluster.segments for name in each.devices}
        for each in line.devices.get(cluster.unit, ()):
            kept = held.get(each.name, each.blocks) == each.blocks  # or a device was lost
            times = [time for time in planned.get(each.name, ()) if kept and not time.sends]
            chunk_s = sum(time.end_s - time.begin_s for time in times) / cluster.num_micro_batches
            yield [
                f"{run.called(cluster.unit)}, {each.name}",
                each.blocks,
                seconds(chunk_s) if times else "–",
                seconds(each.chunk_s),
                *(f"{part_s / (each.span_s or 1.0):.0%}" for _, part_s in _parts(each)),
                amount(each.sent_bytes, "B"),
                amount(each.peak_bytes, "B"),
            ]


def _events(run: Run) -> Iterator[Markup]:
    for line in run.rounds:
        for unit, events in line.events.items():
            for event in events:
                yield note(f"Round {line.round}, {run.called(unit)}: {printable(event)}")
