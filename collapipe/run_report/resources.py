"""What a run took: energy and bytes."""

import math
from collections import defaultdict
from itertools import accumulate

from collapipe.formatting import three_digits
from collapipe.run_report.html import Markup, charts, details, join, note, table
from collapipe.run_report.lines import Series, lines
from collapipe.run_report.rows import Kind, rows, stacked
from collapipe.runs.reading import Run

_UPLOAD = "upload"
_OF_DEVICES, _OF_UPLOAD = Kind("devices", "fill c0"), Kind(_UPLOAD, "fill c1", 0.25, 0.5)


def energy(run: Run) -> Markup:
    """Joules of each unit and device, modelled."""
    if not any(line.costs for line in run.rounds):
        return note("The run's rounds have no modelled energy.")
    missing = run.missing_uploads
    spent = [_spent(run, unit) for unit in range(run.num_units)]
    totals = [math.fsum(each.values()) for each in spent]
    total = math.fsum(joules for each in spent for joules in each.values())
    if not total:
        told = ("0 J in all: no device has an energy law", missing)
        return note(", ".join(filter(None, told)) + ".")
    bars = [
        stacked(
            f"unit {unit}",
            ((_OF_DEVICES, whole - each[_UPLOAD]), (_OF_UPLOAD, each[_UPLOAD])),
            f"{three_digits(whole)} J",
        )
        for unit, (each, whole) in enumerate(zip(spent, totals, strict=True))
    ]
    each_device = [
        [f"unit {unit}", name, f"{joules:.4g} J"]
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


def _spent(run: Run, unit: int) -> dict[str, float]:
    """Joules of a unit's upload, then of each of its devices."""
    spent: defaultdict[str, float] = defaultdict(float, {_UPLOAD: 0.0})
    for line in run.rounds:
        if cost := line.costs.get(unit):
            spent[_UPLOAD] += cost.upload_energy_j
            for name, joules in cost.device_energy_j.items():
                spent[name] += joules
    return spent


def traffic(run: Run) -> Markup:
    """Bytes up and down."""
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
    told = "Up: activations of all local steps and the upload; down: gradients and the download."
    return join(charts(*drawn), note(f"{totals}. {told}"))
