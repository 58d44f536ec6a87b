"""Record which units take part in a run's rounds, and which are suspended or excluded."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from collapipe.errors import (
    BudgetSpentError,
    Called,
    NonFiniteLossError,
    RoundFailedError,
    StorageError,
    few_of,
)
from collapipe.state import ClusterState, unknown_cluster
from collapipe.wire.messages import Failure

ABSENT, SILENT, SPENT = "Absent", "Timeout", BudgetSpentError.__name__
"""Kinds of failures: the unit has left, does not answer, or its owner allows no further round."""
AWAY = ABSENT, SILENT, SPENT
NOT_ASKED = "NotAsked"
_LONGEST_PAUSE = 32  # rounds
Reported = ClusterState | Failure


@dataclass(frozen=True, slots=True)
class Pause:
    """How many times in a row a unit or node has failed, and the first round to try it again."""

    times: int = 0
    until: int = 0

    def longer(self, round_: int) -> Self:
        """The pause after one more failure: 1, 2, 4, … rounds, at most 32."""
        return type(self)(self.times + 1, round_ + min(2**self.times, _LONGEST_PAUSE))


@dataclass
class Silences:
    """Decides which units are asked a question for which all units wait, such as for a checkpoint.

    After 1, 2, 3, … silences in a row a unit is not asked the next 0, 1, 3, … times, at most 31.
    """

    _calls: dict[int, Pause] = field(default_factory=dict)
    _count: int = 0

    def due(self, units: Collection[int]) -> set[int]:
        """Return the units to ask this time; call it once per question."""
        self._count += 1
        return {unit for unit in units if self._count >= self._calls.get(unit, Pause()).until}

    def note(self, unit: int, answer: object) -> None:
        """Record the answer of a unit that was asked this time."""
        pause = self._calls.pop(unit, Pause())
        if isinstance(answer, Failure) and answer.kind == SILENT:
            self._calls[unit] = pause.longer(self._count)


@dataclass(frozen=True, slots=True)
class Roster:
    """The participation of N units, by their numbers.

    A unit is excluded if it has missed ``federation.miss_limit`` rounds in a row, or at once if its
    owner allows no further round. It is asked again after pauses that grow. A unit that answers
    and fails is suspended instead, also for pauses that grow. It then neither ends the run nor
    occupies a place in each round.
    """

    reported: tuple[Reported, ...]  # each unit's last cluster; a ``Failure`` excludes the unit
    last: int = 0  # the last round whose absences were recorded
    # Rounds in a row that a unit has missed. A round counts once, though a unit may miss its
    # training and its checkpoint.
    missed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    calls: Mapping[int, Pause] = field(default_factory=dict)  # when excluded units are asked again
    failed: Mapping[int, Pause] = field(default_factory=dict)  # when suspended units may return
    # all failures since any unit finished a round
    causes: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def excluded(self) -> dict[int, Failure]:
        """The excluded units and the reasons."""
        return {unit: each for unit, each in enumerate(self.reported) if isinstance(each, Failure)}

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """Each unit's cluster; an excluded unit has a cluster that can hold no block."""
        return tuple(
            each if isinstance(each, ClusterState) else unknown_cluster(unit)
            for unit, each in enumerate(self.reported)
        )

    @property
    def absent(self) -> set[int]:
        """Units that missed the last round."""
        return {unit for unit, rounds in self.missed.items() if self.last in rounds}

    def updated(self, reported: Mapping[int, Reported]) -> Self:
        """Return the roster with new reports of units: clusters, or failures that exclude."""
        return replace(
            self, reported=tuple(reported.get(unit, old) for unit, old in enumerate(self.reported))
        )

    def due(self, round_: int) -> list[int]:
        """Excluded units that should be asked before this round."""
        return [unit for unit in self.excluded if round_ >= self.calls.get(unit, Pause()).until]

    def called(self, round_: int, silent: Iterable[int], reported: Mapping[int, Reported]) -> Self:
        """Return the roster after excluded units were asked before a round: some ``reported``, and
        some were ``silent``."""
        return replace(
            self.updated(reported),
            missed={unit: each for unit, each in self.missed.items() if unit not in reported},
            calls=self._longer_calls(round_, silent, back=reported),
        )

    def after_absences(
        self,
        round_: int,
        failures: Mapping[int, Failure],
        present: Collection[int],
        miss_limit: int,
    ) -> Self:
        """Return the roster after a round in which units failed or were ``present``. A failure of a
        unit that answered does not count as an absence."""
        missed = {unit: each for unit, each in self.missed.items() if unit not in present}
        left_out = dict[int, Failure]()
        for unit, failure in failures.items():
            if failure.kind in AWAY:
                missed[unit] = tuple(sorted({*missed.get(unit, ()), round_}))
                if failure.kind == SPENT or len(missed[unit]) >= miss_limit:
                    left_out[unit] = failure
        calls = self._longer_calls(round_, left_out, back=())
        return replace(self.updated(left_out), last=round_, missed=missed, calls=calls)

    def after_failures(
        self, round_: int, failures: Mapping[int, Failure], finished: Collection[int]
    ) -> Self:
        """Return the roster after units answered with a failure, or ``finished`` the round."""
        failed = {unit: pause for unit, pause in self.failed.items() if unit not in finished}
        for unit, failure in failures.items():
            if failure.kind not in AWAY:
                failed[unit] = failed.get(unit, Pause()).longer(round_)
        causes = {} if finished else {**self.causes, **failures}
        return replace(self, failed=failed, causes=causes)

    def resting(self, round_: int) -> dict[int, str]:
        """Suspended units and the reasons; empty if every unit would be suspended."""
        present = self._present
        units = [u for u, pause in self.failed.items() if round_ < pause.until and u in present]
        if present <= {*units}:
            return {}
        return {
            unit: f"failed {self.failed[unit].times} times in a row, suspended until round "
            f"{self.failed[unit].until}"
            for unit in units
        }

    def check(self, round_: int, called: Called) -> None:
        """Raise an error if each present unit has failed since any unit last finished a round.

        The error is ``NonFiniteLossError`` or ``StorageError`` if it is the cause of all failures,
        else ``RoundFailedError``.
        """
        if not self._present <= self.causes.keys():
            return
        causes, kinds = sorted(self.causes.items()), {each.kind for each in self.causes.values()}
        listed = few_of(f"{called(unit)}: {each.kind}: {each.message}" for unit, each in causes)
        commons = (
            error for error in (NonFiniteLossError, StorageError) if kinds == {error.__name__}
        )
        raise next(commons, RoundFailedError)(f"round {round_}: every unit failed: {listed}")

    @property
    def _present(self) -> set[int]:
        return {*range(len(self.reported))} - self.excluded.keys()

    def _longer_calls(
        self, round_: int, silent: Iterable[int], back: Collection[int]
    ) -> dict[int, Pause]:
        calls = {unit: pause for unit, pause in self.calls.items() if unit not in back}
        return calls | {unit: calls.get(unit, Pause()).longer(round_) for unit in silent}
