"""Units by rounds: who took part, what went wrong, and who sent on which channel."""

from collections import Counter
from collections.abc import Mapping, Sequence

from collapipe.errors import printable
from collapipe.formatting import three_digits
from collapipe.plan import UplinkPlan
from collapipe.run_report.drawing import COLOURS, colour
from collapipe.run_report.html import Markup, charts, details, join, note, table
from collapipe.run_report.lines import lines
from collapipe.run_report.queues import spread
from collapipe.run_report.rows import Kind, Row, cells
from collapipe.runs.reading import Run

_TRAINED, _SCHEDULED = Kind("trained", "cell c0"), Kind("took part", "cell c0")
_FAILED = Kind("failed", "cell c1", 0.5, 0.5)
_EXCLUDED = Kind("left out, could not be planned with", "cell c3", 0.35, 0.3)
_SKIPPED = Kind("round skipped", "cell skipped")
_Found = Sequence[tuple[int, int, Kind]]  # unit, round


def participation(run: Run) -> Markup:
    """Units by rounds, and what went wrong."""
    if not run.rounds:
        return note("No round was finished.")
    took_part = _TRAINED if run.trained else _SCHEDULED
    found = [
        (unit, line.round, kind)
        for line in run.rounds
        for kind, units in (
            (_SKIPPED, range(run.num_units) if line.skipped else ()),
            (took_part, line.units),
            (_FAILED, line.failures),
            (_EXCLUDED, line.excluded),
        )
        for unit in units
    ]
    counts = Counter(unit for unit, _, kind in found if kind is took_part)
    told = {n: f"{counts[n]}, {counts[n] / len(run.rounds):.0%}" for n in range(run.num_units)}
    chart = _by_round(run, "Who took part in which round", found, told)
    return join(chart, note("An empty cell: the unit was idle."), _events(run))


def _by_round(run: Run, title: str, found: _Found, told: Mapping[int, str]) -> Markup:
    """A row of cells for each unit."""
    boxes: dict[int, list[tuple[Kind, tuple[float, float]]]] = {}
    for unit, number, kind in found:
        boxes.setdefault(unit, []).append((kind, (number, number)))
    rows = [
        Row(f"unit {unit}", boxes.get(unit, ()), told.get(unit, ""))
        for unit in range(run.num_units)
    ]
    return cells(title, rows, [line.round for line in run.rounds])


def _events(run: Run) -> Markup | None:
    rows: list[list[object]] = []
    for line in run.rounds:
        if line.skipped:
            rows.append([line.round, "–", "round skipped", printable(line.skipped)])
        for what, causes in (("failed", line.failures), ("left out", line.excluded)):
            rows += [[line.round, unit, what, printable(why)] for unit, why in causes.items()]
    if not rows:
        return None
    whole = table(["round", "unit", "what", "why"], rows, "Failures and skipped rounds", words=True)
    return details(f"What went wrong, and why ({len(rows)})", whole)


def radio(run: Run) -> Markup:
    """Who sent on which channel when, and with which power."""
    sent = [
        (line.round, cluster.unit, cluster.uplink)
        for line in run.rounds
        for cluster in line.plan.clusters
        if cluster.uplink
    ]
    if not sent:
        return note("The strategy plans no channels and powers.")
    channels = sorted({uplink.channel for _, _, uplink in sent})
    share = 1 / len(channels)  # a channel's place in its cell tells it, too
    kinds = {
        channel: Kind(f"channel {channel}", f"cell {colour(n)}", n * share, share)
        for n, channel in enumerate(channels)
    }
    found = [(unit, number, kinds[uplink.channel]) for number, unit, uplink in sent]
    powers: dict[float, list[float]] = {}
    own: list[list[UplinkPlan]] = [[] for _ in range(run.num_units)]
    for number, unit, uplink in sent:
        powers.setdefault(float(number), []).append(uplink.power_w)
        own[unit].append(uplink)
    columns = ["unit", "uploads", "power, mean", "least – most", "upload, mean", "least – most"]
    columns += [kind.name for kind in kinds.values()]
    rows = [_row(unit, uplinks, channels) for unit, uplinks in enumerate(own)]
    few = len(channels) <= COLOURS
    return join(
        _by_round(run, "Who sent on which channel", found, {}) if few else None,
        charts(lines("Transmit power", "round", "watts", [spread([*powers.items()])], zero=True)),
        table(columns, rows, "Channels and powers of each unit"),
        note("As planned, with modelled channels. The last columns count uploads."),
    )


def _row(unit: int, own: Sequence[UplinkPlan], channels: Sequence[int]) -> list[object]:
    counts = Counter(uplink.channel for uplink in own)
    powers = _range([uplink.power_w for uplink in own], "W")
    times = _range([uplink.upload_s for uplink in own], "s")
    on_each = [counts[channel] or "–" for channel in channels]
    return [f"unit {unit}", len(own), *powers, *times, *on_each]


def _range(values: Sequence[float], unit: str) -> tuple[str, str]:
    """The mean, and both ends."""
    if not values:
        return "–", "–"
    mean = f"{three_digits(sum(values) / len(values))} {unit}"
    return mean, f"{three_digits(min(values))} – {three_digits(max(values))}"
