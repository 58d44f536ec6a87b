"""Totals over a round's units, for its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe.report import PIPELINE, ClusterReport
from collapipe.sections import CompressionSettings
from collapipe.wire import records
from collapipe.wire.messages import TrainReply
from server_app.rounds.aggregation import Aggregation
from server_app.rounds.replies import Job


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of the round's ``train`` messages, their replies and the decoder link. ``figures`` are
    fields of ``RoundReport``."""

    bytes_up: int
    bytes_down: int
    figures: dict[str, Any]


def totals(
    finished: Mapping[int, TrainReply],
    jobs: Mapping[int, Job],
    compression: CompressionSettings,
    aggregation: Aggregation,
) -> Totals:
    """Add up the bytes and figures of the units that ``finished`` their jobs."""
    reports = {unit: reply.report for unit, reply in finished.items()}
    up = down = 0
    for unit, reply in finished.items():
        job, precision = jobs[unit], compression.of(jobs[unit].plan.uplink).upload
        down += records.num_bytes(job.weights) + records.num_bytes(job.head_state)
        down += reply.report.link_bytes_down
        up += aggregation.upload_bytes(job.weights, precision) + reply.report.link_bytes_up
        up += records.num_bytes(reply.head_state)
    figures = {
        "samples": sum(each.samples for each in reports.values()),
        "target_tokens": sum(each.target_tokens for each in reports.values()),
        "pipeline_s": {
            unit: each.seconds[PIPELINE]
            for unit, each in reports.items()
            if each.devices and PIPELINE in each.seconds
        },
        "devices": {unit: each.devices for unit, each in reports.items() if each.devices},
        "traces": {unit: each.traces for unit, each in reports.items() if each.traces},
        "events": {unit: each.events for unit, each in reports.items() if each.events},
        "seconds": _mean_seconds([*reports.values()]),
    }
    return Totals(up, down, figures)


def _mean_seconds(reports: Sequence[ClusterReport]) -> dict[str, float]:
    """Mean seconds of each phase; a unit that did not report a phase counts as 0."""
    phases = sorted({phase for each in reports for phase in each.seconds})
    return {
        f"unit/{phase}": sum(each.seconds.get(phase, 0.0) for each in reports) / len(reports)
        for phase in phases
    }
