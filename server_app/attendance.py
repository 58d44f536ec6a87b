"""Who misses rounds, and when a unit that was left out is asked again."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from collapipe.errors import BudgetSpentError
from collapipe.wire.messages import Failure

ABSENT, SILENT, SPENT = "Absent", "Timeout", BudgetSpentError.__name__
"""Kinds of failures of a unit that is not there, of one that may be, and of one whose owner allows
no further round."""
NOT_ASKED = "NotAsked"
AWAY = ABSENT, SILENT, SPENT
_LONGEST_PAUSE = 32  # rounds


@dataclass
class Attendance:
    """Of units by their numbers. A unit is left out if it has missed ``miss_limit`` rounds in a
    row, or at once if its owner allows no further round. It is asked again after 1, 2, 4, … rounds,
    at most 32. A round counts once, though a unit may miss its training and its checkpoint."""

    miss_limit: int
    _last: int = 0  # round
    _misses: dict[int, set[int]] = field(default_factory=dict)  # rounds
    _pauses: dict[int, int] = field(default_factory=dict)
    _due: dict[int, int] = field(default_factory=dict)

    def end_round(
        self, round_: int, failures: Mapping[int, Failure], finished: Collection[int]
    ) -> dict[int, Failure]:
        """The units that are left out from now on, and why."""
        self._last, left_out = round_, dict[int, Failure]()
        for unit in finished:
            self._misses.pop(unit, None)
        for unit, failure in failures.items():
            if failure.kind in AWAY:
                missed = self._misses.setdefault(unit, set())
                missed.add(round_)
                if failure.kind == SPENT or len(missed) >= self.miss_limit:
                    left_out[unit] = failure
                    self.asked(unit, round_, answered=False)
        return left_out

    def misses(self, unit: int) -> int:
        """How many rounds in a row the unit has missed by now."""
        return len(self._misses.get(unit, ()))

    def missed(self, unit: int) -> bool:
        """Whether the unit has missed the last round."""
        return self._last in self._misses.get(unit, ())

    def due(self, unit: int, round_: int) -> bool:
        """Whether a unit that is left out is asked before this round."""
        return round_ >= self._due.get(unit, 0)

    def asked(self, unit: int, round_: int, answered: bool) -> None:
        """A unit that is left out was asked before this round, or failed in it."""
        if answered:
            for each in (self._misses, self._pauses, self._due):
                each.pop(unit, None)
            return
        pause = self._pauses.get(unit, 1)
        self._due[unit], self._pauses[unit] = round_ + pause, min(2 * pause, _LONGEST_PAUSE)


@dataclass
class Silences:
    """Who is asked a question of one kind, such as for a checkpoint, that takes time from all units
    if one is silent: a unit that was silent is not asked 0, 1, 3, … further times, at most 31."""

    _calls: Attendance = field(default_factory=lambda: Attendance(1))
    _count: int = 0

    def due(self, units: Collection[int]) -> set[int]:
        """The units that are asked this time."""
        self._count += 1
        return {unit for unit in units if self._calls.due(unit, self._count)}

    def note(self, unit: int, answer: object) -> None:
        """A unit that was asked this time gave this answer."""
        silent = isinstance(answer, Failure) and answer.kind == SILENT
        self._calls.asked(unit, self._count, answered=not silent)
