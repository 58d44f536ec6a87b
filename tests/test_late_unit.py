"""A unit that connects after a run has begun trains from the next round on."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from federated import settings_of, train
from scripted_units import UNTRAINED, scripted_units

from collapipe.flower.inline_grid import InlineGrid


class Late(InlineGrid):
    """A grid that lists its last node from the fourth query on, which is before round 2."""

    looks = 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        nodes = [*super().get_node_ids()]
        return nodes if self.looks > 3 else nodes[:-1]


def test_a_late_unit_is_reported_and_trains_in_the_next_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "federation.num_units=3", "federation.min_units=2", "federation.wait_s=0"
    options = *UNTRAINED, *options, "strategy=all", "federation.rounds=3"
    settings = settings_of(tmp_path, options)
    with Late(scripted_units(), 3) as grid:
        train(grid, settings)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = next(line["round"] for line in lines if 2 in line["units"])
    shards = json.loads((tmp_path / "shards.json").read_text())["shards"]
    assert [each["unit"] for each in shards] == [0, 1, 2]
    assert (shards[2]["joined"], shards[2]["rows"]) == (first, 13)
    out = capsys.readouterr().out
    assert f"round {first}: unit 2 joined, 13 rows\n" in out and first == 2
