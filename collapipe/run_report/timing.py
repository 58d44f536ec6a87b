"""Where the time went: phases, a round's Gantt chart, and the model of time beside the clock."""

import statistics
from collections.abc import Iterable, Sequence

from collapipe.formatting import seconds, three_digits
from collapipe.plan import ClusterPlan
from collapipe.run_report.bars import Bar, Part, bars
from collapipe.run_report.drawing import note
from collapipe.run_report.lines import Series, lines
from collapipe.run_report.markup import Markup, join, table, tag
from collapipe.run_report.uploads import missing_uploads
from collapipe.runs.metrics import RoundLine
from collapipe.runs.reading import Run

_SERVER = ("plan", "send", "train", "aggregate", "evaluate")
_UNIT = "unit/"
_SAME = 1e-9  # of modelled delays that differ by rounding
_PIPELINE, _UPLOAD = ("pipeline, all local steps", 0), ("upload", 1)


def phases(run: Run) -> Markup:
    """Measured seconds of a mean round, on the server and inside the units."""
    if not run.rounds:
        return note("No round was finished.")
    if not run.trained:
        mean = seconds(_total(run, "plan") / len(run.rounds))
        return note(f"Nothing was trained. Planning took {mean} a round in the mean, measured.")
    names = sorted({name for line in run.rounds for name in line.seconds if name.startswith(_UNIT)})
    server = [(name, _on_server(run, name)) for name in _SERVER]
    units = [(name.removeprefix(_UNIT), _total(run, name)) for name in names]
    whole = sum(total for _, total in server) or 1.0
    charts = tag(
        "div",
        bars("Mean round on the server, measured", "seconds", _bars(run, server, 0, whole)),
        bars("Mean round of a unit, measured", "seconds", _bars(run, units, 2, None))
        if units
        else None,
        class_="charts",
    )
    planning = _total(run, "plan") / (_total(run, "round") or 1.0)
    told = (
        f"Planning takes {planning:.2%} of a round. Send: what else comes before the messages are "
        "on their way. Train: from then to the last reply."
    )
    return join(charts, note(told))


def _total(run: Run, name: str) -> float:
    return sum(line.seconds.get(name, 0.0) for line in run.rounds)


def _on_server(run: Run, name: str) -> float:
    """Of a phase alone: rounds tell planning as a part of sending."""
    total = _total(run, name)
    return max(0.0, total - _total(run, "plan")) if name == "send" else total


def _bars(
    run: Run, totals: Iterable[tuple[str, float]], style: int, whole: float | None
) -> list[Bar]:
    rounds = len(run.rounds)
    return [
        Bar(
            name,
            (Part("", style, total / rounds),),
            seconds(total / rounds) + (f", {total / whole:.1%}" if whole else ""),
        )
        for name, total in totals
    ]


def gantt(line: RoundLine) -> Markup:
    """Who computes and sends when in a round: modelled, one unit above the other."""
    rows = [row for cluster in line.plan.clusters if (row := _row(line, cluster)).parts]
    title, across = f"Round {line.round}, modelled", "seconds from the round's beginning"
    chart = bars(title, across, rows, wide=True) if rows else note(f"{title}: no times are known.")
    columns = ["unit", "segments", "S", "m", "pipeline", "channel", "power", "upload", "ends after"]
    told = table(columns, [_cells(line, c) for c in line.plan.clusters], "The round's plan")
    return join(chart, told, _without_channel(line))


def _without_channel(line: RoundLine) -> Markup | None:
    if all(cluster.uplink for cluster in line.plan.clusters):
        return None
    return note(
        "Uploads not counted: the strategy planned no channel for them, and the round's modelled "
        "delay is that of the pipelines alone."
    )


def _times(line: RoundLine, cluster: ClusterPlan) -> tuple[float | None, float | None]:
    """Pipeline and upload, in seconds; None: not modelled."""
    cost = line.costs.get(cluster.unit)
    if cost:
        return cost.pipeline_s, cost.upload_s
    return cluster.latency_s, cluster.uplink.upload_s if cluster.uplink else None


def _row(line: RoundLine, cluster: ClusterPlan) -> Bar:
    pipeline, upload = _times(line, cluster)
    parts = [
        Part(*part, value)
        for part, value in ((_PIPELINE, pipeline), (_UPLOAD, upload))
        if value is not None
    ]
    failed = ", failed" if cluster.unit in line.failures else ""
    whole = sum(part.value for part in parts)
    return Bar(f"unit {cluster.unit}", tuple(parts), seconds(whole) + failed)


def _cells(line: RoundLine, cluster: ClusterPlan) -> list[object]:
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
        _seconds((pipeline or 0.0) + (upload or 0.0) if pipeline is not None else None),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds(value)


def predicted(run: Run) -> Markup:
    """The modelled delay of each round beside its measured time."""
    planned = [line for line in run.rounds if line.plan.clusters]
    delays = [(line.round, line.cost.delay_s) for line in planned if line.cost]
    if not delays:
        return note("The run's rounds have no modelled delay.")
    missing = missing_uploads(run)
    up = ", ".join(filter(None, ("seconds, modelled", missing)))
    modelled = _by_round("Modelled delay of each round", up, 0, delays)
    took = {
        line.round: line.seconds.get("round", 0.0) for line in planned if "train" in line.seconds
    }
    if not took:
        why = "Nothing was trained: there is no measured time beside the modelled delay."
        return join(tag("div", modelled, class_="charts"), note(why))
    measured = _by_round("Measured time of each round", "seconds, measured", 1, [*took.items()])
    pairs = [(delay, took[number]) for number, delay in delays if number in took and delay > 0]
    both, told = _beside(pairs, missing)
    return join(tag("div", modelled, measured, both, class_="charts"), told)


def _by_round(title: str, up: str, style: int, values: Sequence[tuple[int, float]]) -> Markup:
    points = [(float(number), value) for number, value in values]
    return lines(title, "round", up, [Series("", style, points)], zero=True)


def _beside(pairs: list[tuple[float, float]], missing: str) -> tuple[Markup | None, Markup | None]:
    """Measured against modelled seconds, unless these are all the same, and what to make of it."""
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
        f"pipeline and upload{f' ({missing})' if missing else ''} of the slowest unit in the "
        "scheduler's world. Measured: what the "
        "round took where it ran. They agree only where the laws were measured on its devices."
    )
    title, across, up = "Measured against modelled", "seconds, modelled", "seconds, measured"
    chart = lines(title, across, up, series) if least < (1 - _SAME) * most else None
    return chart, note(told)
