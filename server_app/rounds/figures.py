"""The figures of a round's report, from the reports of the units that finished it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from collapipe.config import Settings
from collapipe.report import PIPELINE, ClusterReport, RoundReport
from collapipe.sections import CompressionSettings
from collapipe.wire import records
from collapipe.wire.compression.codec import expected
from collapipe.wire.messages import TrainReply
from server_app.planning.estimates import DEFAULT_FACTOR, RoundObservation, observed
from server_app.planning.scheduler import Trained
from server_app.rounds.aggregation import Aggregated
from server_app.rounds.exchange import Outcomes
from server_app.rounds.replies import Job


def trained_of(
    finished: Mapping[int, TrainReply],
    shares: Mapping[int, float],
    moved: float | None,
    last: RoundObservation | None,
    kept_bytes: Mapping[int, int],
    settings: Settings,
) -> Trained:
    """Return the scheduler's input. The round is observed if the average ``moved`` the model;
    ``last`` is the observation before it."""
    reports = {unit: reply.report for unit, reply in finished.items()}
    losses = {unit: sum(each.losses) / len(each.losses) for unit, each in reports.items()}
    observation = None
    if moved is not None:
        factor = settings.federation.max_update_norm or DEFAULT_FACTOR
        observation = observed(reports, losses, shares, moved, factor, last)
    return Trained(losses, reports, observation, kept_bytes)


def mean_loss(losses: Mapping[int, float], shares: Mapping[int, float]) -> float | None:
    """Return the mean of the units' losses, weighted as in the aggregation; None without units."""
    if not losses:
        return None
    return float(np.average([*losses.values()], weights=[*shares.values()]))


def completed(
    report: RoundReport,
    outcomes: Outcomes,
    jobs: Mapping[int, Job],
    aggregated: Aggregated,
    compression: CompressionSettings,
) -> RoundReport:
    """Return the scheduler's ``report`` with the units that finished their ``jobs``, the failures
    of the others, and the units' figures."""
    finished = outcomes.finished
    reports = {unit: reply.report for unit, reply in finished.items()}
    late = {unit: each for unit, each in aggregated.late.items() if unit not in finished}
    failures = {**late, **outcomes.failures}
    up, down = _bytes(finished, jobs, compression)
    return replace(
        report,
        units=tuple(finished),
        failures={unit: f"{each.kind}: {each.message}" for unit, each in failures.items()},
        bytes_up=up + aggregated.bytes_up + report.checkpoint_bytes,
        bytes_down=down + aggregated.bytes_down,
        samples=sum(each.samples for each in reports.values()),
        target_tokens=sum(each.target_tokens for each in reports.values()),
        input_tokens=sum(each.input_tokens for each in reports.values()),
        pipeline_s={
            unit: each.seconds[PIPELINE]
            for unit, each in reports.items()
            if each.devices and PIPELINE in each.seconds
        },
        devices={unit: each.devices for unit, each in reports.items() if each.devices},
        traces={unit: each.traces for unit, each in reports.items() if each.traces},
        events={unit: each.events for unit, each in reports.items() if each.events},
        seconds=_mean_seconds([*reports.values()]),
    )


def _bytes(
    finished: Mapping[int, TrainReply], jobs: Mapping[int, Job], compression: CompressionSettings
) -> tuple[int, int]:
    """Return the bytes up and down of ``train`` messages, their replies and the decoder link."""
    up = down = 0
    for unit, reply in finished.items():
        job, precision = jobs[unit], compression.of(jobs[unit].plan.uplink).upload
        masked = job.expected
        up += records.num_bytes(expected(job.weights, precision) if masked is None else masked)
        down += records.num_bytes(job.weights) + records.num_bytes(job.head_state)
        down += reply.report.link_bytes_down
        up += reply.report.link_bytes_up + records.num_bytes(reply.head_state)
    return up, down


def _mean_seconds(reports: Sequence[ClusterReport]) -> dict[str, float]:
    """Mean seconds of each phase; a unit that did not report a phase counts as 0."""
    phases = sorted({phase for each in reports for phase in each.seconds})
    return {
        f"unit/{phase}": sum(each.seconds.get(phase, 0.0) for each in reports) / len(reports)
        for phase in phases
    }
