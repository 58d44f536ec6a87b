"""What a round's units did together, for its report."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from collapipe.plan import ClusterPlan
from collapipe.report import PIPELINE, ClusterReport
from collapipe.sections import CompressionSettings
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.compression import upload_bytes
from collapipe.wire.messages import TrainReply
from server_app.rounds.secure_sum import SecureSum


def totals(
    finished: Mapping[int, TrainReply],
    sent: Mapping[int, Tensors],
    head_states: Mapping[int, Tensors],
    plans: Collection[ClusterPlan],
    compression: CompressionSettings,
    masked: SecureSum | None,
) -> dict[str, Any]:
    """Fields of ``RoundReport``: sums, means and figures of the units that ``finished``, each of
    which was ``sent`` weights and perhaps a head's optimiser state."""
    reports = {unit: reply.report for unit, reply in finished.items()}
    uplinks = {each.unit: each.uplink for each in plans}
    down, up = (masked.bytes_down, masked.bytes_up) if masked else (0, 0)
    for unit, reply in finished.items():
        down += records.num_bytes(sent[unit]) + records.num_bytes(head_states[unit])
        down += reply.report.link_bytes_down
        upload = upload_bytes(sent[unit], compression.of(uplinks[unit]).upload)
        up += masked.num_bytes(sent[unit]) if masked else upload
        up += reply.report.link_bytes_up + records.num_bytes(reply.head_state)
    return {
        "samples": sum(each.samples for each in reports.values()),
        "target_tokens": sum(each.target_tokens for each in reports.values()),
        "bytes_up": up,
        "bytes_down": down,
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


def _mean_seconds(reports: Sequence[ClusterReport]) -> dict[str, float]:
    """Of each phase of the units, 0 for a unit that has not told it."""
    phases = sorted({phase for each in reports for phase in each.seconds})
    return {
        f"unit/{phase}": sum(each.seconds.get(phase, 0.0) for each in reports) / len(reports)
        for phase in phases
    }
