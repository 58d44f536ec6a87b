"""Costs of a run: seconds of each phase, modelled and measured time, energy and bytes."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

from collapipe.formatting import seconds, three_digits
from collapipe.run_report.charts import Kind, Series, lines, rows, stacked
from collapipe.run_report.html import Markup, charts, details, join, note, table
from collapipe.runs.reading import Run

_SERVER = ("plan", "send", "train", "aggregate", "evaluate")
_UNIT = "unit/"
_SAME = 1e-9  # modelled delays with a smaller relative difference are equal
_UPLOAD = "upload"
_OF_DEVICES, _OF_UPLOAD = Kind("devices", "c0"), Kind(_UPLOAD, "c1", 0.25, 0.5)


def phases(run: Run) -> Markup:
    """Show measured seconds of a mean round, on the server and on units."""
    if not run.rounds:
        return note("No round was finished.")
    planning = _total(run, "plan")
    if not run.trained:
        mean = seconds(planning / len(run.rounds))
        return note(f"Nothing was trained. Planning took {mean} a round in the mean, measured.")
    names = sorted({name for line in run.rounds for name in line.seconds if name.startswith(_UNIT)})
    server = {name: _total(run, name) for name in _SERVER}
    units = {name.removeprefix(_UNIT): _total(run, name) for name in names}
    whole, rounds = sum(server.values()) or 1.0, len(run.rounds)
    trained = sum(not line.seconds.keys().isdisjoint(names) for line in run.rounds)
    return join(
        charts(
            _bars(rounds, "Mean round on the server, measured", server, "c0", whole),
            _bars(trained, "Mean round of a unit, measured", units, "c2") if units else None,
        ),
        note(
            f"Planning takes {planning / (_total(run, 'round') or 1.0):.2%} of a round. Send: all "
            "else before the messages are on their way. Train: from then to the last reply."
        ),
    )


def _total(run: Run, name: str) -> float:
    return sum(line.seconds.get(name, 0.0) for line in run.rounds)


def _bars(
    rounds: int, title: str, totals: dict[str, float], style: str, whole: float | None = None
) -> Markup:
    bars = []
    for name, total in totals.items():
        mean, share = total / rounds, f", {total / whole:.1%}" if whole else ""
        bars.append(stacked(name, [(Kind("", style), mean)], seconds(mean) + share))
    return rows(title, "seconds", bars)


def predicted(run: Run) -> Markup:
    """Show the modelled delay and the measured time of each round, and their ratio."""
    planned = [line for line in run.rounds if line.plan.clusters]
    delays = {line.round: line.cost.delay_s for line in planned}
    if not delays:
        return note("The run's rounds have no modelled delay.")
    missing = run.missing_uploads
    up = ", ".join(filter(None, ("seconds, modelled", missing)))
    modelled = _by_round("Modelled delay of each round", up, 0, delays)
    took = {
        line.round: line.seconds.get("round", 0.0) for line in planned if "train" in line.seconds
    }
    if not took:
        why = "Nothing was trained: there is no measured time to compare with the modelled delay."
        return join(charts(modelled), note(why))
    measured = _by_round("Measured time of each round", "seconds, measured", 1, took)
    pairs = [(delay, took[n]) for n, delay in delays.items() if n in took and delay > 0]
    if not pairs:
        return charts(modelled, measured)
    ratio = statistics.median(took / delay for delay, took in pairs)
    ends = min(pairs)[0], max(pairs)[0]
    series = [
        Series("a round", 2, pairs, joined=False),
        Series(f"ratio {ratio:.3g}", 3, [(end, ratio * end) for end in ends]),
    ]
    title, across, up = "Measured against modelled", "seconds, modelled", "seconds, measured"
    both = lines(title, across, up, series) if ends[0] < (1 - _SAME) * ends[1] else None
    explanation = (
        f"Measured time is {ratio:.3g} times the modelled delay (median of rounds). Modelled: "
        f"pipeline and upload{f' ({missing})' if missing else ''} of the slowest unit, as the "
        "scheduler predicts them. Measured: the round where it ran. They agree only where the laws "
        "were measured on its devices."
    )
    return join(charts(modelled, measured, both), note(explanation))


def _by_round(title: str, up: str, style: int, values: Mapping[int, float]) -> Markup:
    points = [(float(number), value) for number, value in values.items()]
    return lines(title, "round", up, [Series("", style, points)], zero=True)


def energy(run: Run) -> Markup:
    """Show modelled joules of each unit and device."""
    if not any(line.costs for line in run.rounds):
        return note("The run's rounds have no modelled energy.")
    spent = [defaultdict[str, float](float, {_UPLOAD: 0.0}) for _ in range(run.num_units)]
    for line in run.rounds:
        for unit, cost in line.costs.items():
            spent[unit][_UPLOAD] += cost.upload_energy_j
            for name, joules in cost.device_energy_j.items():
                spent[unit][name] += joules
    missing, totals = run.missing_uploads, [math.fsum(each.values()) for each in spent]
    total = math.fsum(joules for each in spent for joules in each.values())
    if not total:
        facts = ("0 J in all: no device has an energy law", missing)
        return note(", ".join(filter(None, facts)) + ".")
    bars = [
        stacked(
            run.called(unit),
            ((_OF_DEVICES, whole - each[_UPLOAD]), (_OF_UPLOAD, each[_UPLOAD])),
            f"{three_digits(whole)} J",
        )
        for unit, (each, whole) in enumerate(zip(spent, totals, strict=True))
    ]
    each_device = [
        [run.called(unit), name, f"{joules:.4g} J"]
        for unit, each in enumerate(spent)
        for name, joules in each.items()
    ]
    return join(
        charts(rows("Energy of all rounds, modelled", "joules", bars)),
        note(
            f"{three_digits(total)} J in all{f', {missing}' if missing else ''}. Devices without "
            "an energy law count as 0."
        ),
        details("Each device", table(["unit", "what", "energy"], each_device, "Energy of devices")),
    )


def traffic(run: Run) -> Markup:
    """Show bytes up and down."""
    if not run.rounds:
        return note("No round was finished.")
    numbers = [float(line.round) for line in run.rounds]
    sizes = {
        "up": [line.bytes_up / 1e6 for line in run.rounds],
        "down": [line.bytes_down / 1e6 for line in run.rounds],
    }
    if not any(sum(each) for each in sizes.values()):
        return note("Nothing was sent, neither up nor down.")
    drawn = []
    for title, summed in (("Bytes of each round", False), ("Bytes until then", True)):
        series = [
            Series(name, n, [*zip(numbers, accumulate(each) if summed else each, strict=True)])
            for n, (name, each) in enumerate(sizes.items())
        ]
        drawn.append(lines(title, "round", "MB", series, zero=True))
    totals = ", ".join(f"{sum(each):,.1f} MB {name}" for name, each in sizes.items())
    outside = (
        run.summary.bytes_down - sum(each.bytes_down for each in run.rounds) if run.summary else 0
    )
    legend = (
        "Up: activations of all local steps, the upload, and units' states for checkpoints; down: "
        "gradients and the download."
    )
    if outside > 0:
        legend += (
            f" Outside rounds the server sent {outside / 1e6:,.1f} MB more: frozen weights, "
            "restored states, and weights for evaluation on units."
        )
    return join(charts(*drawn), note(f"{totals}. {legend}"))
