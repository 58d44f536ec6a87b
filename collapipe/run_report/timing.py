"""Where the time went: phases, a round's Gantt chart, and the model of time beside the clock."""

import statistics
from collections.abc import Iterable, Sequence

from collapipe.formatting import seconds, three_digits
from collapipe.plan import ClusterPlan
from collapipe.report import RoundReport
from collapipe.run_report.html import Markup, charts, join, note, table
from collapipe.run_report.lines import Series, lines
from collapipe.run_report.rows import Kind, Row, rows, stacked
from collapipe.runs.reading import Run

_SERVER = ("plan", "send", "train", "aggregate", "evaluate")
_UNIT = "unit/"
_SAME = 1e-9  # relative difference of modelled delays that is rounding
_PIPELINE = Kind("pipeline, all local steps", "fill c0")
_UPLOAD = Kind("upload", "fill c1", 0.25, 0.5)


def phases(run: Run) -> Markup:
    """Measured seconds of a mean round, on the server and inside the units."""
    if not run.rounds:
        return note("No round was finished.")
    planning = _total(run, "plan")
    if not run.trained:
        mean = seconds(planning / len(run.rounds))
        return note(f"Nothing was trained. Planning took {mean} a round in the mean, measured.")
    names = sorted({name for line in run.rounds for name in line.seconds if name.startswith(_UNIT)})
    server = {name: _total(run, name) for name in _SERVER}
    server["send"] = max(0.0, server["send"] - planning)  # rounds tell planning as a part of it
    units = {name.removeprefix(_UNIT): _total(run, name) for name in names}
    whole = sum(server.values()) or 1.0
    return join(
        charts(
            _bars(run, "Mean round on the server, measured", server, "c0", whole),
            _bars(run, "Mean round of a unit, measured", units, "c2") if units else None,
        ),
        note(
            f"Planning takes {planning / (_total(run, 'round') or 1.0):.2%} of a round. Send: all "
            "else before the messages are on their way. Train: from then to the last reply."
        ),
    )


def _total(run: Run, name: str) -> float:
    return sum(line.seconds.get(name, 0.0) for line in run.rounds)


def _bars(
    run: Run, title: str, totals: dict[str, float], style: str, whole: float | None = None
) -> Markup:
    kind = Kind("", f"fill {style}")
    told = {name: f", {total / whole:.1%}" if whole else "" for name, total in totals.items()}
    means = {name: total / len(run.rounds) for name, total in totals.items()}
    bars = [
        stacked(name, [(kind, mean)], seconds(mean) + told[name]) for name, mean in means.items()
    ]
    return rows(title, "seconds", bars)


def gantt(line: RoundReport) -> Markup:
    """Who computes and sends when in a round: modelled, one unit above the other."""
    bars = [row for cluster in line.plan.clusters if (row := _row(line, cluster)).boxes]
    title, across = f"Round {line.round}, modelled", "seconds from the round's beginning"
    chart = rows(title, across, bars, wide=True) if bars else note(f"{title}: no times are known.")
    columns = ["unit", "segments", "S", "m", "pipeline", "channel", "power", "upload", "ends after"]
    told = table(columns, [_cells(line, c) for c in line.plan.clusters], "The round's plan")
    without = not all(cluster.uplink for cluster in line.plan.clusters)
    missing = (
        "Uploads not counted: the strategy planned no channel for them, and the round's modelled "
        "delay is that of the pipelines alone."
    )
    return join(chart, told, note(missing) if without else None)


def _times(line: RoundReport, cluster: ClusterPlan) -> tuple[float | None, float | None]:
    """Seconds of pipeline and upload; None: not modelled."""
    cost = line.costs.get(cluster.unit)
    if cost:
        return cost.pipeline_s, cost.upload_s
    return cluster.latency_s, cluster.uplink.upload_s if cluster.uplink else None


def _row(line: RoundReport, cluster: ClusterPlan) -> Row:
    pairs = zip((_PIPELINE, _UPLOAD), _times(line, cluster), strict=True)
    parts = [(kind, value) for kind, value in pairs if value is not None]
    failed = ", failed" if cluster.unit in line.failures else ""
    told = seconds(sum(value for _, value in parts)) + failed
    return stacked(f"unit {cluster.unit}", parts, told)


def _cells(line: RoundReport, cluster: ClusterPlan) -> list[object]:
    pipeline, upload = _times(line, cluster)
    uplink = cluster.uplink
    return [
        f"unit {cluster.unit}",
        " + ".join(f"{each.span.blocks} {each.device}" for each in cluster.segments) or "–",
        len(cluster.segments) or "–",
        cluster.num_micro_batches,
        _seconds(pipeline),
        uplink.channel if uplink else "–",
        f"{three_digits(uplink.power_w)} W" if uplink else "–",
        _seconds(upload),
        _seconds(None if pipeline is None else pipeline + (upload or 0.0)),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds(value)


def predicted(run: Run) -> Markup:
    """The modelled delay of each round beside its measured time."""
    planned = [line for line in run.rounds if line.plan.clusters]
    delays = {line.round: line.cost.delay_s for line in planned if line.cost}
    if not delays:
        return note("The run's rounds have no modelled delay.")
    up = ", ".join(filter(None, ("seconds, modelled", run.missing_uploads)))
    modelled = _by_round("Modelled delay of each round", up, 0, delays.items())
    took = {
        line.round: line.seconds.get("round", 0.0) for line in planned if "train" in line.seconds
    }
    if not took:
        why = "Nothing was trained: there is no measured time beside the modelled delay."
        return join(charts(modelled), note(why))
    measured = _by_round("Measured time of each round", "seconds, measured", 1, took.items())
    pairs = [(delay, took[n]) for n, delay in delays.items() if n in took and delay > 0]
    both, told = _against(pairs, run.missing_uploads)
    return join(charts(modelled, measured, both), told)


def _by_round(title: str, up: str, style: int, values: Iterable[tuple[int, float]]) -> Markup:
    points = [(float(number), value) for number, value in values]
    return lines(title, "round", up, [Series("", style, points)], zero=True)


def _against(
    pairs: Sequence[tuple[float, float]], missing: str
) -> tuple[Markup | None, Markup | None]:
    """Measured against modelled seconds, unless these are all the same, and their ratio."""
    if not pairs:
        return None, None
    ratio = statistics.median(took / delay for delay, took in pairs)
    delays = [delay for delay, _ in pairs]
    least, most = min(delays), max(delays)
    series = [
        Series("a round", 2, pairs, joined=False),
        Series(f"ratio {ratio:.3g}", 3, [(end, ratio * end) for end in (least, most)]),
    ]
    told = (
        f"Measured time is {ratio:.3g} times the modelled delay (median of rounds). Modelled: "
        f"pipeline and upload{f' ({missing})' if missing else ''} of the slowest unit, as the "
        "scheduler predicts them. Measured: the round where it ran. They agree only where the laws "
        "were measured on its devices."
    )
    title, across, up = "Measured against modelled", "seconds, modelled", "seconds, measured"
    chart = lines(title, across, up, series) if least < (1 - _SAME) * most else None
    return chart, note(told)
