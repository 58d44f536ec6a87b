"""The metrics that a unit exports to Prometheus."""

from prometheus_client import REGISTRY

from client_app.answering import count_message, count_round
from collapipe.report import ClusterReport


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"collapipe_{name}", labels) or 0.0


def test_rounds_failures_phases_and_bytes_are_counted() -> None:
    def figures() -> list[float]:
        return [
            sample("message_seconds_count", kind="train", outcome="answered"),
            sample("message_seconds_count", kind="train", outcome="failed"),
            sample("phase_seconds_total", phase="forward"),
            sample("bytes_total", way="up"),
            sample("bytes_total", way="down"),
        ]

    before = figures()
    count_message("train", 1.5, 1000, 900)
    count_message("train", 1.5, 1000, None)
    seconds = {"forward": 0.25}
    count_round(ClusterReport(0, (1.0,), 1, 1, seconds, link_bytes_up=50, link_bytes_down=9))
    grown = [after - first for after, first in zip(figures(), before, strict=True)]
    assert grown == [1, 1, 0.25, 950, 2009]
    assert sample("devices") == 0
