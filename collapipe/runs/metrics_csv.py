"""A round's line of ``metrics.jsonl`` as a row of figures, for spreadsheets."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

Cell = str | int | float

_SECONDS = ("plan", "train", "aggregate", "round", "evaluate")
COLUMNS = (
    "round",
    "train_loss",
    "evaluation_loss",
    "metric_name",
    "metric_value",
    "samples",
    "target_tokens",
    "clock_s",
    "delay_s",
    "bytes_up",
    "bytes_down",
    "scheduled_units",
    "trained_units",
    "failed_units",
    "excluded_units",
    "skipped",
    "upload_energy_j",
    "device_energy_j",
    "longest_queue",
    "mean_queue",
    *(f"{phase}_s" for phase in _SECONDS),
    "wall_s",
)
"""The header: the same for every run, so that tables of several can be put together."""


def csv_row(line: Mapping[str, Any]) -> dict[str, Cell]:
    """A cell for each of ``COLUMNS``; empty where the round has no such figure.

    Units are numbers with spaces in between. ``delay_s`` and energies are modelled; ``plan_s`` …
    ``evaluate_s`` and ``wall_s`` are measured, ``clock_s`` is what the run's clock is.
    """
    plan, costs, seconds = line["plan"], line["cost"]["clusters"], line["seconds"]
    metric = line.get("metric") or {}
    queues = line["queues"] if plan["queues"] else []  # the strategy may keep none
    row: dict[str, Cell | None] = {
        "round": line["round"],
        "train_loss": line["train_loss"],
        "evaluation_loss": line.get("evaluation_loss"),
        "metric_name": metric.get("name"),
        "metric_value": metric.get("value"),
        "samples": line["samples"],
        "target_tokens": line["target_tokens"],
        "clock_s": line["clock_s"],
        "delay_s": line["cost"]["delay_s"],
        "bytes_up": line["bytes_up"],
        "bytes_down": line["bytes_down"],
        "scheduled_units": _listed(cluster["unit"] for cluster in plan["clusters"]),
        "trained_units": _listed(line["units"]),
        "failed_units": _listed(line["failures"]),
        "excluded_units": _listed(line["excluded"]),
        "skipped": line["skipped"],
        "upload_energy_j": math.fsum(cost["upload_energy_j"] for cost in costs),
        "device_energy_j": math.fsum(
            joules for cost in costs for joules in cost["device_energy_j"].values()
        ),
        "longest_queue": max(queues, default=None),
        "mean_queue": math.fsum(queues) / len(queues) if queues else None,
        **{f"{phase}_s": seconds.get(phase) for phase in _SECONDS},
        "wall_s": line["wall_s"],
    }
    return {name: "" if value is None else value for name, value in row.items()}


def _listed(units: Iterable[object]) -> str:
    return " ".join(map(str, units))
