"""A unit that does not reply at checkpoints or evaluations is asked less often."""

from collections.abc import Mapping

import pytest
from flwr.app import RecordDict
from sections import run_settings

from collapipe.flower.inline_grid import InlineGrid
from collapipe.state import unknown_cluster
from collapipe.wire.messages import Failure
from server_app import questions
from server_app.kept_states import gather
from server_app.roster import ABSENT, NOT_ASKED, SILENT, Roster
from server_app.units import Kept, Units


class RecordingUnits(Units):
    """Records the units that are asked; the ``silent`` units do not reply."""

    def __init__(self, *silent: int) -> None:
        grid = InlineGrid(None, 3)  # type: ignore[arg-type]
        super().__init__(grid, run_settings(num_units=3), nodes={0: 2, 1: 3, 2: 4})
        self.silent, self.asked = {*silent}, list[int]()
        self.roster = Roster(tuple(map(unknown_cluster, range(3))))

    def end_round(self, round_: int, failures: Mapping[int, Failure]) -> None:
        """End a round in which the failed units were absent and the others present."""
        present = {0, 1, 2} - failures.keys()
        self.roster = self.roster.after_absences(round_, failures, present=present, miss_limit=3)

    def ask(  # type: ignore[override]
        self, contents: Mapping[int, object], timeout_s: float = 0
    ) -> dict[int, Kept | Failure]:
        self.asked += contents
        return {unit: Failure(SILENT, "") if unit in self.silent else {} for unit in contents}

    def evaluation(self) -> list[int]:
        """The units that an evaluation asks."""
        self.asked = []
        found = self.evaluate({unit: RecordDict() for unit in self.nodes}, 0, self.roster.absent)
        assert found.keys() == self.nodes.keys()
        kinds = {each.kind for each in found.values() if isinstance(each, Failure)}
        assert kinds <= {SILENT, NOT_ASKED}
        return self.asked

    def checkpoint(self) -> tuple[list[int], list[int]]:
        """The units that a checkpoint asks, and the units that fail."""
        self.asked = []
        found = dict(gather(self, self.roster, lambda unit: questions.keep({}, lambda kept: None)))
        return self.asked, [unit for unit, each in found.items() if isinstance(each, Failure)]


def test_a_unit_that_missed_the_round_is_not_asked_at_its_checkpoint() -> None:
    units = RecordingUnits()
    for kind in (SILENT, ABSENT):
        units.end_round(5, {1: Failure(kind, "")})
        assert units.checkpoint() == ([0, 2], [])
    units.end_round(6, {})
    assert units.checkpoint() == ([0, 1, 2], [])


def test_a_silent_unit_is_asked_at_fewer_and_fewer_checkpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After the unit replies, it is asked at each checkpoint again."""
    units = RecordingUnits(1)
    units.places.of["rome"] = 1
    asked = [1 in units.checkpoint()[0] for _ in range(40)]
    assert [number for number, was in enumerate(asked, 1) if was] == [1, 2, 4, 8, 16, 32]
    logged = [each for each in caplog.messages if each.startswith("rome: the checkpoint has")]
    assert len(logged) == 40
    units.silent.clear()
    asked = [1 in units.checkpoint()[0] for _ in range(29)]
    assert asked == [False] * 23 + [True] * 6


def test_evaluations_ask_a_silent_unit_less_often_and_count_separately() -> None:
    units = RecordingUnits(1)
    assert 1 in units.checkpoint()[0]
    assert [1 in units.evaluation() for _ in range(8)] == [
        number in (1, 2, 4, 8) for number in range(1, 9)
    ]
    units.end_round(5, {0: Failure(SILENT, "")})
    assert units.evaluation() == [2]


def test_units_that_are_not_asked_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    units = RecordingUnits(0, 1, 2)
    for _ in range(3):
        caplog.clear()
        units.checkpoint()
    (line,) = caplog.messages
    assert line.startswith("unit 0, unit 1, unit 2: the checkpoint has its state of the previous")
