"""A unit that comes when a run has begun, and one that is back after it was left out."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest
from federated import settings_of, train

from client_app.app import app
from collapipe.state import AffineLaw, ClusterState, DeviceProfile
from server_app.grid import InlineGrid
from server_app.rounds.scheduler import same_cluster


class Late(InlineGrid):
    """Its last node is there from the third look on: the first is before the run, the second before
    round 1."""

    looks = 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        nodes = [*super().get_node_ids()]
        return nodes if self.looks > 3 else nodes[:-1]


def test_a_late_unit_is_told_counted_and_trains_in_the_next_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "federation.num_units=3", "federation.min_units=2", "federation.wait_s=0"
    settings, settled = settings_of(tmp_path, [*options, "strategy=all", "federation.rounds=3"])
    with Late(app, 3, {"overrides": shlex.join(settled)}) as grid:
        train(grid, settings)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(line["round"] for line in lines if 2 in line["units"])
    shards = json.loads((tmp_path / "shards.json").read_text())["shards"]
    assert [each["unit"] for each in shards] == [0, 1, 2]
    assert (shards[2]["joined"], shards[2]["rows"]) == (first, 13)
    out = capsys.readouterr().out
    assert f"round {first}: unit 2 joined, 13 rows\n" in out and first == 2


def test_real_devices_that_are_measured_anew_are_the_same_cluster() -> None:
    def cluster(v: float, name: str = "box", real: bool = True, rows: int = 9) -> ClusterState:
        device = DeviceProfile(name, AffineLaw(v, 0.0, 0.0, 0.0))
        return ClusterState(0, (device,), rows, real_devices=real)

    assert same_cluster(cluster(1.0), cluster(2.0))
    assert not same_cluster(cluster(1.0), cluster(1.0, name="another"))
    assert not same_cluster(cluster(1.0), cluster(1.0, rows=10))
    assert not same_cluster(cluster(1.0, real=False), cluster(2.0, real=False))
