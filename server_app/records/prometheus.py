"""Write the last round's figures for Prometheus; ``collapipe deploy serve`` serves the file."""

from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from collapipe.report import RoundReport


def write_metrics(file: Path, line: RoundReport) -> None:
    """Replace ``file`` by the figures after a round; bytes and seconds are of this round only."""
    registry = CollectorRegistry()

    def tell(name: str, words: str, value: float | None) -> None:
        if value is not None:
            Gauge(f"collapipe_{name}", words, registry=registry).set(value)

    def tell_each(name: str, words: str, label: str, values: Mapping[str, float]) -> None:
        gauge = Gauge(f"collapipe_{name}", words, [label], registry=registry)
        for key, value in values.items():
            gauge.labels(key).set(value)

    tell("round", "Number of finished rounds.", line.round)
    tell("units", "Units that finished the last round.", len(line.units))
    tell("failures", "Scheduled units that failed in the last round.", len(line.failures))
    tell("excluded", "Units that were excluded from the last round.", len(line.excluded))
    tell("samples", "Samples trained on in the last round.", line.samples)
    tell("train_loss", "Mean loss over the units' steps.", line.train_loss)
    tell("evaluation_loss", "Loss on the evaluation rows.", line.evaluation_loss)
    tell("wall_seconds", "Seconds since the run began.", line.wall_s)
    tell_each("seconds", "Seconds of each phase of the last round.", "phase", line.seconds)
    ways = {"up": float(line.bytes_up), "down": float(line.bytes_down)}
    tell_each("bytes", "Activations, gradients and weights.", "way", ways)
    queues = {str(unit): length for unit, length in enumerate(line.kept_queues)}
    tell_each("queue", "Virtual queue Y of each unit.", "unit", queues)
    devices = {str(unit): float(len(reports)) for unit, reports in line.devices.items()}
    tell_each("devices", "Real devices that worked for each unit.", "unit", devices)
    write_to_textfile(str(file), registry)
