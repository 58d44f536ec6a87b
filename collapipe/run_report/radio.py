"""Channels and powers, as planned."""

from collections import Counter
from collections.abc import Sequence

from collapipe.formatting import three_digits
from collapipe.plan import UplinkPlan
from collapipe.run_report.drawing import COLOURS, note
from collapipe.run_report.lines import lines
from collapipe.run_report.markup import Markup, join, table, tag
from collapipe.run_report.matrix import Kind, matrix
from collapipe.run_report.queues import spread
from collapipe.runs.reading import Run

Sent = tuple[int, int, UplinkPlan]  # round, unit, how


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
    return join(
        _channel_matrix(run, sent, channels) if len(channels) <= COLOURS else None,
        _powers(sent),
        _table(run, sent, channels),
        note("As planned, with modelled channels. The last columns count uploads."),
    )


def _channel_matrix(run: Run, sent: Sequence[Sent], channels: Sequence[int]) -> Markup:
    """A channel's place in its cell tells it, too."""
    share = 1 / len(channels)
    cells = {
        Kind(f"channel {channel}", f"c{n}", n * share, share): [
            (unit, number) for number, unit, uplink in sent if uplink.channel == channel
        ]
        for n, channel in enumerate(channels)
    }
    names, numbers = (
        [f"unit {n}" for n in range(run.num_units)],
        [each.round for each in run.rounds],
    )
    return matrix("Who sent on which channel", names, numbers, cells, [""] * run.num_units)


def _powers(sent: Sequence[Sent]) -> Markup:
    by_round: dict[float, list[float]] = {}
    for number, _, uplink in sent:
        by_round.setdefault(float(number), []).append(uplink.power_w)
    series = spread(list(by_round.items()), " of the round's units")
    chart = lines("Transmit power", "round", "watts", series, zero=True)
    return tag("div", chart, class_="charts")


def _table(run: Run, sent: Sequence[Sent], channels: Sequence[int]) -> Markup:
    columns = ["unit", "uploads", "power, mean", "least – most", "upload, mean", "least – most"]
    columns += [f"channel {channel}" for channel in channels]
    own: list[list[UplinkPlan]] = [[] for _ in range(run.num_units)]
    for _, unit, uplink in sent:
        own[unit].append(uplink)
    rows = [_row(unit, uplinks, channels) for unit, uplinks in enumerate(own)]
    return table(columns, rows, "Channels and powers of each unit")


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
