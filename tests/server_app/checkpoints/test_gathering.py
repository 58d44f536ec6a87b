"""Checkpoints gather and restore the states of a few units at a time."""

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from full_disk import full_disk
from sections import federation_settings, run_settings

from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import Channel, ClusterState, Uplink, unknown_cluster
from collapipe.wire import records
from collapipe.wire.messages import Failure
from optim.cost import sending_s
from server_app import kept_states, questions
from server_app.checkpoints.file import KeptFiles
from server_app.checkpoints.folder import CheckpointFolder
from server_app.checkpoints.writing import RunCheckpoints
from server_app.kept_states import gather, restore
from server_app.planning.scheduler import SchedulerState
from server_app.questions import Question
from server_app.records.summary import History
from server_app.roster import ABSENT, SILENT, Roster
from server_app.rounds.results import RunState
from server_app.units import Kept, Units
from server_app.world.environment import EnvironmentState

UNITS = 40


class Alive:
    """Counts the tensors of units' states in memory, and the largest number so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, kept: Kept) -> Kept:
        for group in kept.values():
            for tensor in group.values():
                weakref.finalize(tensor, self._remove)
                self.now += 1
                self.most = max(self.most, self.now)
        return kept

    def _remove(self) -> None:
        self.now -= 1


class Counted(Mapping[int, Kept]):
    """The states of units, which are read from files and counted."""

    def __init__(self, files: KeptFiles, alive: Alive) -> None:
        self._files, self._alive = files, alive

    def __getitem__(self, unit: int) -> Kept:
        return self._alive.add(self._files[unit])

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def state(unit: int) -> Kept:
    return {"optimizer": {"w/exp_avg": torch.full((25,), float(unit))}}


def roster(num_units: int) -> Roster:
    return Roster(tuple(map(unknown_cluster, range(num_units))))


def keep(unit: int) -> Question[Kept]:
    return questions.keep({"optimizer": 2**16}, lambda kept: None)


def known(client: object, num_units: int, **changes: object) -> Units:
    grid = InlineGrid(client, num_units)  # type: ignore[arg-type]
    settings = run_settings(num_units=num_units, **changes)
    return Units(grid, settings, nodes=dict(enumerate(grid.get_node_ids())))


def test_only_a_few_units_states_are_in_memory(tmp_path: Path) -> None:
    """The number of states in memory has a fixed limit, and each unit gets its state back."""
    restored = dict[int, Kept]()

    def client(message: Message, context: Context) -> Message:
        unit = int(context.node_config["partition-id"])
        if message.metadata.message_type == records.KEEP:
            return Message(records.pack_groups(state(unit)), reply_to=message)
        restored[unit] = records.unpack_groups(message.content)
        return Message(records.pack_groups({}), reply_to=message)

    units, files, alive = known(client, UNITS), CheckpointFolder(tmp_path), Alive()
    messages = list[weakref.ref[RecordDict]]()

    def unpacked(content: RecordDict) -> Kept:
        messages.append(weakref.ref(content))
        return alive.add(records.unpack_groups(content))

    files.begin("000001")
    without_3 = roster(UNITS).updated({3: Failure(ABSENT, "")})
    gc.disable()
    try:
        for unit, kept in gather(
            units, without_3, lambda unit: replace(keep(unit), unpack=unpacked)
        ):
            assert not isinstance(kept, Failure)
            files.add("000001", unit, kept)
            del kept
    finally:
        gc.enable()
    assert sum(message() is not None for message in messages) <= questions._AT_ONCE
    there = KeptFiles(tmp_path / "checkpoints" / ".000001.partial")
    assert [*there] == [unit for unit in range(UNITS) if unit != 3]
    assert alive.most <= questions._AT_ONCE + 1 and alive.now == 0
    assert restore(units, Counted(there, alive)) == {}
    assert alive.most <= questions._AT_ONCE + 1 and alive.now == 0
    assert units.bytes_down == (UNITS - 1) * 100
    for unit in range(UNITS):
        optimizer = restored[unit].get("optimizer", {})
        assert [each.tolist() for each in optimizer.values()] == (
            [] if unit == 3 else [[unit] * 25]
        )


def test_units_that_missed_rounds_are_asked_last_and_silent_ones_stop_no_other() -> None:
    units, groups = known(None, 20, round_timeout_s=60), list[list[int]]()
    away = {5: Failure(ABSENT, "")}
    missed = roster(20).after_absences(1, away, present=(), miss_limit=2)
    missed = missed.after_absences(2, {}, present=(), miss_limit=2)  # unit 5 was not in the plan

    def ask(contents: Mapping[int, object], timeout_s: float) -> dict[int, Kept | Failure]:
        groups.append([*contents])
        answers = dict[int, Kept | Failure]({unit: {} for unit in contents})
        for unit in {2, 5} & contents.keys():
            answers[unit] = Failure(SILENT, "")
        return answers

    units.ask = ask  # type: ignore[method-assign, assignment]
    found = dict(gather(units, missed, keep))
    assert [unit for group in groups for unit in group] == [u for u in range(20) if u != 5] + [5]
    assert [unit for unit, each in found.items() if isinstance(each, Failure)] == [2, 5]


def test_no_further_units_are_asked_once_a_state_cannot_be_stored() -> None:
    units, asked = known(None, 20, round_timeout_s=60), list[int]()

    def ask(contents: Mapping[int, object], timeout_s: float) -> dict[int, Kept | Failure]:
        asked.extend(contents)
        return {unit: {} for unit in contents}

    units.ask = ask  # type: ignore[method-assign, assignment]
    sent = list[int]()
    sent.extend(unit for unit, _ in gather(units, roster(20), keep, more=lambda: len(sent) < 3))
    assert sent == asked == [*range(questions._AT_ONCE)]


def test_a_checkpoint_waits_no_longer_than_two_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were not asked by then count as not asked, not as silent."""
    now, timeouts = [0.0], list[float]()
    monkeypatch.setattr(kept_states.time, "monotonic", lambda: now[0])
    units = known(None, 40, round_timeout_s=10)

    def ask(contents: Mapping[int, object], timeout_s: float) -> dict[int, Failure]:
        timeouts.append(timeout_s)
        now[0] += min(timeout_s, 10)
        return dict.fromkeys(contents, Failure(SILENT, ""))

    units.ask = ask  # type: ignore[method-assign, assignment]
    kinds = Counter(
        each.kind for _, each in gather(units, roster(40), keep) if isinstance(each, Failure)
    )
    assert (timeouts, now) == ([20.0, 10.0], [20.0])
    assert kinds == {SILENT: 2 * questions._AT_ONCE, "NotAsked": 40 - 2 * questions._AT_ONCE}


def test_sending_states_takes_each_units_seconds_on_its_best_channel() -> None:
    channels = (Channel(1e6, 0.0, 1e-12), Channel(2e6, 0.0, 1e-12))
    clusters: list[ClusterState] = []
    for unit, gains in enumerate([(1e-6, 1e-6), (1e-6, 0.0), (0.0, 0.0)]):
        uplink = Uplink(1.0, 1.0, 8.0, 0.0, gains)
        clusters.append(ClusterState(unit, unknown_cluster(unit).devices, 1, uplink))
    request = Mock(clusters=(*clusters, unknown_cluster(3)), channels=channels)
    rates = [2e6 * np.log2(1.5), 1e6 * np.log2(2.0)]
    bits = dict.fromkeys(range(4), 3e6)
    expected = sum(3e6 / rate for rate in rates)
    assert sending_s(bits, request, "none") == pytest.approx(expected, rel=1e-12)
    assert sending_s({}, request, "none") == 0.0


def test_a_full_disk_skips_one_checkpoint_and_leaves_no_partial_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later states of that checkpoint are refused, and the next checkpoint is written."""
    settings = Mock(tree={"seed": 0}, federation=federation_settings(checkpoint_every=1, keep=2))
    tokenizer = Mock(**{"pack.return_value": "{}"})
    folder = Mock(path=tmp_path, frozen={}, **{"sizes.return_value": {}})
    checkpoints = RunCheckpoints(settings, folder, tokenizer)
    run_state = RunState(SchedulerState(Roster(()), (), (), EnvironmentState(())))
    for round_ in (1, 2, 3):
        store = checkpoints.begin(round_)
        assert store is not None
        if round_ == 2:
            with full_disk():
                assert not store(0, state(7))
            assert not store(1, state(7))
        else:
            assert store(0, state(0))
            assert round_ == 3 or store(1, state(1))
        with caplog.at_level(logging.WARNING):
            checkpoints.write(History(0.0, num_rounds=round_), run_state, {})
    logged = [each for each in caplog.messages if "no checkpoint is written" in each]
    assert len(logged) == 1 and "round 2" in logged[0]
    files = CheckpointFolder(tmp_path)
    assert files.names() == ["000001", "000003"]
    assert not [*(tmp_path / "checkpoints").glob(".*")]
    # the last checkpoint has unit 1's state of the first checkpoint
    assert [*files.kept] == [0, 1] and files.kept[1]["optimizer"]["w/exp_avg"][0] == 1
