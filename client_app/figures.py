"""A deployed unit's figures for Prometheus: times and bytes of its messages and rounds."""

from prometheus_client import Counter, Gauge, Summary

from collapipe.report import ClusterReport

_SECONDS = Summary("collapipe_message_seconds", "Seconds per message.", ["kind", "outcome"])
_PHASES = Counter("collapipe_phase_seconds", "Seconds of the phases of rounds.", ["phase"])
_BYTES = Counter("collapipe_bytes", "Bytes of weights, activations and gradients.", ["way"])
_DEVICES = Gauge("collapipe_devices", "Real devices that took part in the last round.")


def count_message(kind: str, seconds: float, num_bytes: int, answered: int | None) -> None:
    """Add a message of ``num_bytes``. ``answered`` is the bytes of the reply, None if it failed."""
    outcome = "failed" if answered is None else "answered"
    _SECONDS.labels(kind, outcome).observe(seconds)
    _BYTES.labels("down").inc(num_bytes)
    _BYTES.labels("up").inc(answered or 0)


def count_round(report: ClusterReport) -> None:
    """Add a round's phases, link traffic and devices; ``count_message`` adds its message."""
    for phase, taken_s in report.seconds.items():
        _PHASES.labels(phase).inc(taken_s)
    _BYTES.labels("down").inc(report.link_bytes_down)
    _BYTES.labels("up").inc(report.link_bytes_up)
    _DEVICES.set(len(report.devices))
