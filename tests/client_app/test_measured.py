"""Measured laws in a unit's reports, and the scheduler that plans with them."""

import gzip
import json
from pathlib import Path

import pytest
from federated import play

from client_app.measured import with_measured_laws
from collapipe.state import AffineLaw, ClusterState, DeviceProfile
from pipeline import engine
from pipeline.profile import ChunkTime

STATE = ClusterState(
    3,
    (
        DeviceProfile("fast", AffineLaw(9.0, 9.0, 0.3, 0.2), max_blocks=4),
        DeviceProfile("idle", AffineLaw(7.0, 0.0, 0.1, 0.1)),
    ),
    10,
)


def chunks(seconds: float) -> list[ChunkTime]:
    return [ChunkTime("fast", 2, samples, 2 * samples * seconds) for samples in (1, 2, 4)]


def test_a_device_that_worked_tells_what_it_took() -> None:
    known, kept = with_measured_laws(STATE, {}, chunks(0.5))
    assert known.devices[0].time.u == pytest.approx(0.5)
    assert known.devices[0].time.v == pytest.approx(0, abs=1e-9)
    assert (known.devices[0].time.w, known.devices[0].max_blocks) == (0.3, 4)
    assert known.devices[1] == STATE.devices[1]
    again, _ = with_measured_laws(STATE, kept, chunks(1.5))
    assert again.devices[0].time.u == pytest.approx(1.0)  # of both rounds' chunks


def test_the_next_round_is_planned_with_what_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock of our own: every look at it is a second later, in each of two looks a chunk."""
    ticks = iter(range(10**9))

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return float(next(ticks))

    monkeypatch.setattr(engine, "time", Clock)
    play(tmp_path, "pipeline.profile=true", "cluster=even", "federation.num_units=1")
    requests = gzip.decompress((tmp_path / "requests.jsonl.gz").read_bytes()).splitlines()
    first, second = (json.loads(text)["clusters"][0]["devices"] for text in requests)
    plan = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["plan"]
    worked = {segment["device"] for segment in plan["clusters"][0]["segments"]}
    assert worked
    for before, after in zip(first, second, strict=True):
        assert (before["time"] != after["time"]) == (after["name"] in worked)
        if after["name"] in worked:
            assert after["time"]["u"] + after["time"]["v"] > 0.01  # seconds; modelled: thousandths
