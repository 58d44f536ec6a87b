"""Show units by round: participation, failures, channels, queues, drift, estimated constants."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from collapipe.errors import printable
from collapipe.formatting import three_digits
from collapipe.plan import UplinkPlan
from collapipe.run_report.charts import COLOURS, QUIET, Kind, Row, Series, cells, colour_of, lines
from collapipe.run_report.html import Markup, charts, details, join, note, table
from collapipe.runs.reading import Run
from collapipe.state import HeadPlace, Precision

_TRAINED, _SCHEDULED = Kind("trained", "c0"), Kind("took part", "c0")
_FAILED = Kind("failed", "c1", 0.5, 0.5)
_EXCLUDED = Kind("excluded, could not be planned with", "c3", 0.35, 0.3)
_SKIPPED = Kind("round skipped", QUIET, opacity=0.4)
_MOST_LINES, _NAMED, _LIMIT_STYLE = 4, 2, 13
_ASSUMED = {
    "φ², bound of ‖∇F‖²": "gradient_bound",
    "β, smoothness": "smoothness",
    "ξ, curvature": "curvature",
    "κ = βη²/(2N)": "kappa",
    "C, W": "interference_constant_w",
    "Γ max": "gamma_max",
    "V, 1/s": "drift_weight",
}
_CHOSEN = (
    ("activation", "Precision of each activation", get_args(Precision)),
    ("upload", "Precision of each upload", get_args(Precision)),
    ("head", "Where each head trained", get_args(HeadPlace)),
)
_Rows = Sequence[tuple[float, Sequence[float]]]  # round, and a value for each unit


def participation(run: Run) -> Markup:
    """Show the participation of units by round, and their failures."""
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
    captions = {n: f"{counts[n]}, {counts[n] / len(run.rounds):.0%}" for n in range(run.num_units)}
    chart = _by_round(run, "Who took part in which round", found, captions)
    return join(chart, note("An empty cell: the unit was idle."), _events(run))


def _by_round(
    run: Run, title: str, found: Sequence[tuple[int, int, Kind]], captions: Mapping[int, str]
) -> Markup:
    """Return a chart with a row of cells for each unit; ``found`` has units and rounds."""
    boxes: defaultdict[int, list[tuple[Kind, tuple[float, float]]]] = defaultdict(list)
    for unit, number, kind in found:
        boxes[unit].append((kind, (number, number)))
    units = range(run.num_units)
    rows = [Row(run.called(unit), boxes[unit], captions.get(unit, "")) for unit in units]
    return cells(title, rows, [line.round for line in run.rounds])


def _events(run: Run) -> Markup | None:
    rows = [
        [line.round, "–" if unit is None else run.called(unit), what, printable(why)]
        for line in run.rounds
        for what, causes in (
            ("round skipped", {None: line.skipped} if line.skipped else {}),
            ("failed", line.failures),
            ("excluded", line.excluded),
        )
        for unit, why in causes.items()
    ]
    whole = table(["round", "unit", "what", "why"], rows, "Failures and skipped rounds", words=True)
    return details(f"What went wrong, and why ({len(rows)})", whole) if rows else None


def radio(run: Run) -> Markup:
    """Show the channels and powers of units by round."""
    sent = [
        (line.round, cluster.unit, cluster.uplink)
        for line in run.rounds
        for cluster in line.plan.clusters
        if cluster.uplink
    ]
    if not sent:
        return note("The strategy plans no channels and powers.")
    channels = sorted({uplink.channel for _, _, uplink in sent})
    powers: dict[float, list[float]] = {}
    own: list[list[UplinkPlan]] = [[] for _ in range(run.num_units)]
    for number, unit, uplink in sent:
        powers.setdefault(float(number), []).append(uplink.power_w)
        own[unit].append(uplink)
    columns = ["unit", "uploads", "power, mean", "least – most", "upload, mean", "least – most"]
    rows = [
        [
            run.called(unit),
            len(each),
            *_range([uplink.power_w for uplink in each], "W"),
            *_range([uplink.upload_s for uplink in each], "s"),
            *([uplink.channel for uplink in each].count(channel) or "–" for channel in channels),
        ]
        for unit, each in enumerate(own)
    ]
    columns += [f"channel {channel}" for channel in channels]
    title, few = "Who sent on which channel", len(channels) <= COLOURS
    return join(
        _chosen(run, "channel", title, channels, "channel {}") if few else None,
        charts(lines("Transmit power", "round", "watts", [spread([*powers.items()])], zero=True)),
        table(columns, rows, "Channels and powers of each unit"),
        note("As planned, with modelled channels. The last columns count uploads."),
        *(_chosen(run, *each) for each in _CHOSEN),
    )


def _chosen(
    run: Run, what: str, title: str, among: Sequence[object], form: str = "{}"
) -> Markup | None:
    """Show the scheduler's choices for units, if it chose any; a box's place also shows them."""
    found = [
        (cluster.unit, line.round, choice)
        for line in run.rounds
        for cluster in line.plan.clusters
        if cluster.uplink and (choice := getattr(cluster.uplink, what)) is not None
    ]
    made = [choice for choice in among if choice in {each[2] for each in found}]
    share = 1 / max(len(made), 1)
    kinds = {c: Kind(form.format(c), colour_of(n), n * share, share) for n, c in enumerate(made)}
    boxes = [(unit, number, kinds[choice]) for unit, number, choice in found]
    return _by_round(run, title, boxes, {}) if boxes else None


def _range(values: Sequence[float], unit: str) -> tuple[str, str]:
    if not values:
        return "–", "–"
    mean = f"{three_digits(sum(values) / len(values))} {unit}"
    return mean, f"{three_digits(min(values))} – {three_digits(max(values))}"


def queues(run: Run) -> Markup:
    """Show queues Y and drift Γ of each round, and the constants of the convergence bound.

    The queues keep the mean of Γ since the first round below Γ max (C10). Constants are shown as
    estimated in training and as set in the strategy.
    """
    columns = ["what the bound assumes", "estimated from training", "set for the strategy"]
    estimates = run.rounds[-1].estimates if run.rounds else None
    known = [
        [name, _figure(getattr(estimates, field, None)), _figure(run.option(f"strategy.{field}"))]
        for name, field in _ASSUMED.items()
    ]
    rows = [row for row in known if row[1:] != ["–", "–"]]
    shown = [n for n in range(3) if any(row[n] != "–" for row in rows)]
    assumed = table(
        [columns[n] for n in shown],
        [[row[n] for n in shown] for row in rows],
        columns[0].capitalize(),
    )
    if not run.keeps_queues:
        return join(note("The strategy keeps no queues."), assumed if rows else None)
    after = [(float(line.round), line.queues) for line in run.rounds if line.queues]
    errors = [(float(line.round), line.error_queues) for line in run.rounds if line.error_queues]
    errors = errors if any(any(queues) for _, queues in errors) else []
    limit = run.option("strategy.gamma_max")
    bound = float(limit) if isinstance(limit, int | float) else None
    gammas = dict(drifts(run, bound))
    means = np.cumsum([*gammas.values()], axis=0) / np.arange(1, len(gammas) + 1)[:, None]
    mean_drift = [*zip(map(float, gammas), means.tolist(), strict=True)]
    explanation = f"Units shown by name have the largest means of all {run.num_units}."
    return join(
        charts(
            _by_unit(run, "Virtual queues Y after each round", "Y", after),
            _by_unit(run, "Drift Γ, mean of the rounds so far", "Γ", mean_drift, bound),
            _by_unit(run, "Queues Q of what rounding costs the gradient", "Q", errors),
        ),
        note(explanation) if run.num_units > _MOST_LINES else None,
        assumed if rows else None,
    )


def _figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def drifts(run: Run, limit: float | None) -> Iterator[tuple[int, Sequence[float]]]:
    """Yield each round's number and Γ of all units, as planned.

    For failed units and skipped rounds Γ follows from the change of the queue (eq. 29); if the
    queue is empty, this is an upper bound of Γ.
    """
    before: Sequence[float] = (0.0,) * run.num_units
    for line in run.rounds:
        gammas = line.plan.gammas
        if limit is not None and line.queues:
            implied = [after - was + limit for after, was in zip(line.queues, before, strict=True)]
            pairs = enumerate(gammas or implied)
            gammas = tuple(implied[unit] if unit in line.failures else each for unit, each in pairs)
        before = line.queues or before
        if gammas:
            yield line.round, gammas


def _by_unit(
    run: Run, title: str, up: str, known: _Rows, limit: float | None = None
) -> Markup | None:
    """Return a line per unit or, for many units, a band, the median, and the worst units."""
    if not known:
        return None
    num_units = len(known[0][1])
    means = [statistics.fmean(row[unit] for _, row in known) for unit in range(num_units)]
    worst = sorted(range(num_units), key=lambda unit: -means[unit])[:_NAMED]
    drawn = range(num_units) if num_units <= _MOST_LINES else worst
    series = [
        Series(run.called(unit), style, [(number, row[unit]) for number, row in known])
        for style, unit in enumerate(drawn, num_units > _MOST_LINES)
    ]
    if num_units > _MOST_LINES:
        series.insert(0, spread(known))
    if limit is not None:
        ends = [(known[0][0], limit), (known[-1][0], limit)]
        series.append(Series(f"Γ max, {limit:g}", _LIMIT_STYLE, ends))
    return lines(title, "round", up, series, zero=True)


def spread(known: _Rows) -> Series:
    """Return the units' median in each round, with a band from the least to the most."""
    medians = [(number, statistics.median(row)) for number, row in known]
    band = [(number, min(row), max(row)) for number, row in known]
    return Series("median of the units, least to most", 0, medians, band=band)
