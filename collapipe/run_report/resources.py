"""What a run took: energy and bytes."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from collapipe.formatting import three_digits
from collapipe.run_report.bars import Bar, Part, bars
from collapipe.run_report.drawing import note
from collapipe.run_report.lines import Point, Series, lines
from collapipe.run_report.markup import Markup, details, join, table, tag
from collapipe.run_report.uploads import missing_uploads
from collapipe.runs.reading import Run

_UPLOAD = "upload"


def energy(run: Run) -> Markup:
    """Joules of each unit and device, modelled."""
    if not any(line.costs for line in run.rounds):
        return note("The run's rounds have no modelled energy.")
    missing = missing_uploads(run)
    spent = [_spent(run, unit) for unit in range(run.num_units)]
    total = math.fsum(joules for each in spent for joules in each.values())
    if not total:
        told = ("0 J in all: no device has an energy law", missing)
        return note(", ".join(filter(None, told)) + ".")
    each_device: list[list[object]] = [
        [f"unit {unit}", name, f"{joules:.4g} J"]
        for unit, each in enumerate(spent)
        for name, joules in each.items()
    ]
    rows = [_bar(unit, each) for unit, each in enumerate(spent)]
    chart = bars("Energy of all rounds, modelled", "joules", rows)
    return join(
        tag("div", chart, class_="charts"),
        note(
            f"{three_digits(total)} J in all{f', {missing}' if missing else ''}. Devices without "
            "an energy law count as 0."
        ),
        details("Each device", table(["unit", "what", "energy"], each_device, "Energy of devices")),
    )


def _spent(run: Run, unit: int) -> dict[str, float]:
    """Of a unit: joules of its upload, then of each device."""
    spent: defaultdict[str, float] = defaultdict(float, {_UPLOAD: 0.0})
    for line in run.rounds:
        if cost := line.costs.get(unit):
            spent[_UPLOAD] += cost.upload_energy_j
            for name, joules in cost.device_energy_j.items():
                spent[name] += joules
    return spent


def _bar(unit: int, spent: dict[str, float]) -> Bar:
    upload, total = spent[_UPLOAD], math.fsum(spent.values())
    parts = (Part("devices", 0, total - upload), Part(_UPLOAD, 1, upload))
    return Bar(f"unit {unit}", parts, f"{three_digits(total)} J")


def traffic(run: Run) -> Markup:
    """Bytes up and down."""
    numbers = [float(line.round) for line in run.rounds]
    kinds: list[tuple[str, list[int]]] = [
        ("up", [line.bytes_up for line in run.rounds]),
        ("down", [line.bytes_down for line in run.rounds]),
    ]
    each = [Series(name, n, _megabytes(numbers, sizes)) for n, (name, sizes) in enumerate(kinds)]
    summed = [
        Series(name, n, _megabytes(numbers, list(accumulate(sizes))))
        for n, (name, sizes) in enumerate(kinds)
    ]
    if not numbers:
        return note("No round was finished.")
    if not any(sum(sizes) for _, sizes in kinds):
        return note("Nothing was sent, neither up nor down.")
    totals = ", ".join(f"{sum(sizes) / 1e6:,.1f} MB {name}" for name, sizes in kinds)
    charts = [
        lines("Bytes of each round", "round", "MB", each, zero=True),
        lines("Bytes until then", "round", "MB", summed, zero=True),
    ]
    told = (
        f"{totals}. Up: activations of all local steps and the upload; down: gradients and the "
        "download."
    )
    return join(tag("div", *charts, class_="charts"), note(told))


def _megabytes(numbers: Sequence[float], sizes: Sequence[int]) -> list[Point]:
    return [(number, size / 1e6) for number, size in zip(numbers, sizes, strict=True)]
