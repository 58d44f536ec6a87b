"""Units that miss rounds, leave, return as other nodes or join late do not stop the others."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from federated import settings_of, train
from flwr.app import Context, Error, Message, RecordDict
from resumed import differing
from run_files import rounds_of
from scripted_units import UNTRAINED, scripted_units

from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import unknown_cluster
from collapipe.wire import records
from collapipe.wire.kept_file import flat
from collapipe.wire.messages import Failure
from server_app.checkpoints.folder import CheckpointFolder
from server_app.roster import ABSENT, SILENT, Roster

LOST = {1: Failure(ABSENT, "gone")}


UNKNOWN = unknown_cluster(0)


def roster() -> Roster:
    """Two units that have reported."""
    return Roster((UNKNOWN, UNKNOWN))


def after(
    was: Roster, round_: int, failures: Mapping[int, Failure], present: Collection[int], limit: int
) -> Roster:
    return was.after_absences(round_, failures, present=present, miss_limit=limit)


def test_an_excluded_unit_is_asked_again_less_and_less_often() -> None:
    own = after(roster(), 1, LOST, {0}, 1)
    assert own.excluded == LOST
    asked = []
    for round_ in range(2, 120):
        if own.due(round_):
            asked.append(round_)
            own = own.called(round_, silent=own.due(round_), reported={})
    assert asked == [2, 4, 8, 16, 32, 64, 96]
    own = own.called(120, silent=(), reported={1: UNKNOWN})
    assert own == replace(roster(), last=1)


@pytest.mark.parametrize("kind", [ABSENT, SILENT])
def test_only_consecutive_misses_count(kind: str) -> None:
    own, missed = roster(), {1: Failure(kind, "")}
    own = after(own, 1, missed, {0}, 2)
    own = after(own, 2, {}, {0, 1}, 2)
    own = after(own, 3, missed, {0}, 2)
    assert not own.excluded
    assert after(own, 4, missed, {0}, 2).excluded == missed


def test_a_unit_misses_a_round_only_once() -> None:
    """The unit does not reply to the training or to the checkpoint of the round."""
    missed = {1: Failure(SILENT, "")}
    own = after(roster(), 1, missed, {0}, 2)
    own = after(own, 1, missed, (), 2)
    assert not own.excluded
    assert after(own, 2, missed, {0}, 2).excluded == missed


def test_a_unit_that_replies_with_an_error_has_not_missed_the_round() -> None:
    failed = {1: Failure("DataError", "no rows")}
    assert after(roster(), 1, failed, {0}, 1) == replace(roster(), last=1)


class Moving(InlineGrid):
    """A grid that calls ``turn`` at each round; ``absent`` nodes send an error or no reply."""

    def __init__(self, turn: Callable[["Moving", int], None]) -> None:
        super().__init__(scripted_units(), 3)
        self.absent, self.turn, self.asked = set[int](), turn, list[int]()
        self.leaves_at = ""  # node 3 leaves at a question of this kind
        self.code: int | None = 5  # Flower's error for an absent node; None: no reply

    def get_node_ids(self) -> Iterable[int]:
        left = self.absent if self.code == 5 else ()
        return [node for node in super().get_node_ids() if node not in left]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        for round_ in {m.metadata.group_id for m in messages if m.metadata.message_type == "train"}:
            self.turn(self, int(round_))
        if messages and messages[0].metadata.message_type == self.leaves_at:
            self.absent = {3}
        self.asked += [
            message.metadata.dst_node_id
            for message in messages
            if message.metadata.message_type != records.EVALUATE
        ]
        away = [each for each in messages if each.metadata.dst_node_id in self.absent]
        there = [each for each in messages if each not in away]
        replies = list(super().send_and_receive(there, timeout=timeout))
        if self.code is None:
            return replies
        error = Error(self.code, "node is unavailable")
        return replies + [Message(error, reply_to=each) for each in away]

    def restart(self, node: int, as_node: int) -> None:
        """Restart a node; Flower then knows it by a new number."""
        was = self._contexts.pop(node)
        how = was.node_config, RecordDict(), was.run_config
        self._contexts[as_node] = Context(was.run_id, as_node, *how)


def finished(
    folder: Path, turn: Callable[[Moving, int], None], *options: str, absent: int = 0
) -> tuple[list[list[int]], Moving]:
    """The units that finished each round, and the grid."""
    settings = settings_of(folder, (*UNTRAINED, "federation.checkpoint_every=1", *options))
    grid = Moving(turn)
    grid.absent |= {absent}
    train(grid, settings)
    return [line["units"] for line in rounds_of(folder)], grid


def test_a_unit_that_leaves_is_excluded_until_it_returns_as_another_node(tmp_path: Path) -> None:
    def turn(grid: Moving, round_: int) -> None:
        if round_ == 2:
            grid.absent = {3}
            grid.asked.clear()
        if round_ == 4:
            grid.restart(3, as_node=50)

    units, grid = finished(tmp_path, turn, "federation.rounds=5")
    assert units == [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert grid.asked.count(3) == 1  # in the round that it missed


def test_a_unit_that_joins_late_takes_part_from_the_next_round(tmp_path: Path) -> None:
    def turn(grid: Moving, round_: int) -> None:
        if round_ == 2:
            grid.absent.clear()

    fewer = "federation.min_units=2", "federation.wait_s=0", "federation.rounds=3"
    units, _ = finished(tmp_path, turn, *fewer, absent=4)
    assert units == [[0, 1], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("code", "asked"), [(5, 1), (None, 2), (0, 3)], ids=["gone", "silent", "an error"]
)
def test_a_unit_that_does_not_send_its_state_does_not_prevent_a_checkpoint(
    tmp_path: Path, code: int | None, asked: int
) -> None:
    """The checkpoint has the unit's previous state. A unit that does not reply is excluded."""

    def turn(grid: Moving, round_: int) -> None:
        if round_ == 2:
            grid.code, grid.leaves_at = code, records.KEEP
            grid.asked.clear()

    options = "federation.rounds=3", "federation.keep=3"
    units, grid = finished(tmp_path, turn, *options)
    assert units == [[0, 1, 2], [0, 1, 2], [0, 2]]
    # Round 2's training and checkpoint; then nothing, its state, or round 3's two messages.
    assert grid.asked.count(3) == 1 + asked
    folder = CheckpointFolder(tmp_path)
    first, *later = (folder.read(name).training.units for name in folder.names())
    assert first[1] and len(later) == 2
    for each in later:
        assert not differing(flat(each[1]), flat(first[1]))
        assert differing(flat(each[0]), flat(first[0]))
