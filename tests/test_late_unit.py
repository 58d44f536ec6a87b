"""A unit that connects or returns after a run has begun trains from the next round on."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from federated import run, settings_of, train
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units

from client_app.node import number_of
from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import ClusterState
from collapipe.wire import records


class Late(InlineGrid):
    """A grid that lists its last node from the fourth query on, which is before round 2."""

    looks = 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        nodes = [*super().get_node_ids()]
        return nodes if self.looks > 3 else nodes[:-1]


def test_a_late_unit_is_reported_and_trains_in_the_next_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Units with fewer rows than a batch are named, each once."""
    options = "federation.num_units=3", "federation.min_units=2", "federation.wait_s=0"
    options = *UNTRAINED, *options, "strategy=all", "federation.rounds=3", "batch_size=14"
    settings = settings_of(tmp_path, options)
    with Late(scripted_units(), 3) as grid:
        train(grid, settings)
    lines = rounds_of(tmp_path)
    first = next(line["round"] for line in lines if 2 in line["units"])
    shards = json.loads((tmp_path / "shards.json").read_text())["shards"]
    assert [each["unit"] for each in shards] == [0, 1, 2]
    assert (shards[2]["joined"], shards[2]["rows"]) == (first, 13)
    out = capsys.readouterr().out
    assert f"round {first}: unit 2 joined, 13 rows\n" in out and first == 2
    small = [line for line in caplog.messages if "fewer rows than batch_size=14" in line]
    assert [line.partition("(")[2] for line in small] == ["unit 1: 13)", "unit 2: 13)"]


def test_a_unit_that_returns_with_other_rows_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unit 1 misses round 2 and returns with fewer rows; unit 2 returns with the same ones."""
    units, trained = scripted_units(), list[int]()

    def returning(message: Message, context: Context) -> Message:
        unit, kind = number_of(context), message.metadata.message_type
        if kind == records.TRAIN:
            trained.append(unit)
            if unit and trained.count(unit) == 2:
                return Message(Error(5, "not there"), reply_to=message)
        reply = units(message, context)
        if kind == records.STATE and unit == 1 and trained:
            state = cast(ClusterState, records.unpack_state(reply.content).state)
            reply.content = records.pack_state(replace(state, num_samples=9), ())
        return reply

    options = "federation.num_units=3", "federation.miss_limit=1", "strategy=all"
    client = cast(ClientApp, returning)
    run(tmp_path / "run", *UNTRAINED, *options, "federation.rounds=4", client=client)
    shards = json.loads((tmp_path / "run" / "shards.json").read_text())["shards"]
    assert [(each["unit"], each["rows"]) for each in shards] == [(0, 14), (1, 9), (2, 13)]
    assert not any("joined" in each for each in shards)
    out = capsys.readouterr().out
    assert "unit 1 is back, 9 rows instead of 13\n" in out and "unit 2 is back\n" in out
