"""Which units take part in a run's rounds, which rest, and which are left out."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from collapipe.errors import (
    BudgetSpentError,
    Called,
    CollaPipeError,
    NonFiniteLossError,
    RoundFailedError,
    StorageError,
    few_of,
)
from collapipe.state import ClusterState, unknown_cluster
from collapipe.wire.messages import Failure

ABSENT, SILENT, SPENT = "Absent", "Timeout", BudgetSpentError.__name__
"""Kinds of failures of a unit that has left, of one that does not answer, and of one whose owner
allows no further round."""
AWAY = ABSENT, SILENT, SPENT
NOT_ASKED = "NotAsked"
_LONGEST_PAUSE = 32  # rounds
Reported = ClusterState | Failure


@dataclass(frozen=True, slots=True)
class Pause:
    """How many times in a row something has failed, and the first round to try it again."""

    times: int = 0
    until: int = 0

    def longer(self, round_: int) -> Self:
        """The pause after one more failure: 1, 2, 4, … rounds, at most 32."""
        return type(self)(self.times + 1, round_ + min(2**self.times, _LONGEST_PAUSE))


@dataclass
class Silences:
    """Whom to ask a question of one kind that takes everybody's time if one unit is silent, such
    as for a checkpoint: a unit that was silent is not asked 0, 1, 3, … further times, at most 31.
    """

    _calls: dict[int, Pause] = field(default_factory=dict)
    _count: int = 0

    def due(self, units: Collection[int]) -> set[int]:
        """The units that are asked this time."""
        self._count += 1
        return {unit for unit in units if self._count >= self._calls.get(unit, Pause()).until}

    def note(self, unit: int, answer: object) -> None:
        """A unit that was asked this time gave this answer."""
        pause = self._calls.pop(unit, Pause())
        if isinstance(answer, Failure) and answer.kind == SILENT:
            self._calls[unit] = pause.longer(self._count)


@dataclass(frozen=True, slots=True)
class Roster:
    """All that is known of who takes part; N units, by their numbers.

    A unit is left out if it has missed ``federation.miss_limit`` rounds in a row, or at once if its
    owner allows no further round. It is asked again after a while, ever more seldom. A unit that
    answers and fails is not left out: it rests, ever longer, so that it neither ends everybody's
    run nor takes the place of others in each round.

    Attributes
    ----------
    reported
        The cluster that each unit reported last; a ``Failure`` leaves the unit out.
    last
        The last round of which it is known who was absent.
    missed
        Rounds in a row that a unit has missed. A round counts once, though a unit may miss its
        training and its checkpoint.
    calls
        When each unit that is left out is asked again.
    failed
        When each unit that has failed its last rounds may take part again.
    causes
        All failures since any unit finished a round.
    """

    reported: tuple[Reported, ...]
    last: int = 0
    missed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    calls: Mapping[int, Pause] = field(default_factory=dict)
    failed: Mapping[int, Pause] = field(default_factory=dict)
    causes: Mapping[int, Failure] = field(default_factory=dict)

    @property
    def excluded(self) -> dict[int, Failure]:
        """The units that are left out, and why."""
        return {unit: each for unit, each in enumerate(self.reported) if isinstance(each, Failure)}

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """Each unit's cluster; one that can hold no block for a unit that is left out."""
        return tuple(
            each if isinstance(each, ClusterState) else unknown_cluster(unit)
            for unit, each in enumerate(self.reported)
        )

    @property
    def absent(self) -> set[int]:
        """Units that have missed the last round."""
        return {unit for unit, rounds in self.missed.items() if self.last in rounds}

    def updated(self, reported: Mapping[int, Reported]) -> Self:
        """The roster after units have reported their clusters, or were left out."""
        return replace(
            self,
            reported=tuple(reported.get(unit, old) for unit, old in enumerate(self.reported)),
        )

    def due(self, round_: int) -> list[int]:
        """Units that are left out and should be asked before this round."""
        return [unit for unit in self.excluded if round_ >= self.calls.get(unit, Pause()).until]

    def called(self, round_: int, silent: Iterable[int], reported: Mapping[int, Reported]) -> Self:
        """The roster after units that were left out were asked before a round, and some were
        ``silent``."""
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
        """The roster after units failed, or were ``present``, in a round; a failure of a unit that
        answers is no absence."""
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
        """The roster after units that answer have failed a round, or ``finished`` it."""
        failed = {unit: pause for unit, pause in self.failed.items() if unit not in finished}
        for unit, failure in failures.items():
            if failure.kind not in AWAY:
                failed[unit] = failed.get(unit, Pause()).longer(round_)
        causes = {} if finished else {**self.causes, **failures}
        return replace(self, failed=failed, causes=causes)

    def resting(self, round_: int) -> dict[int, str]:
        """Units that take no part in this round, and why; empty if every unit would rest."""
        present = self._present
        units = [unit for unit, pause in self.failed.items() if round_ < pause.until]
        units = [unit for unit in units if unit in present]
        if present <= {*units}:
            return {}
        return {
            unit: f"failed {self.failed[unit].times} times in a row, rests until round "
            f"{self.failed[unit].until}"
            for unit in units
        }

    def check(self, round_: int, called: Called) -> None:
        """Raise what ends the run if all units that are present have failed, one after the other,
        since any has finished a round.

        The error is ``NonFiniteLossError`` or ``StorageError`` if all of them failed by it, else
        ``RoundFailedError``.
        """
        if self._present <= self.causes.keys():
            raise _nobody_finished(round_, self.causes, called)

    @property
    def _present(self) -> set[int]:
        return {*range(len(self.reported))} - self.excluded.keys()

    def _longer_calls(
        self, round_: int, silent: Iterable[int], back: Collection[int]
    ) -> dict[int, Pause]:
        calls = {unit: pause for unit, pause in self.calls.items() if unit not in back}
        return calls | {unit: calls.get(unit, Pause()).longer(round_) for unit in silent}


def _nobody_finished(
    round_: int, failures: Mapping[int, Failure], called: Called
) -> CollaPipeError:
    causes = few_of(
        f"{called(unit)}: {f.kind}: {f.message}" for unit, f in sorted(failures.items())
    )
    for common in (NonFiniteLossError, StorageError):
        if all(failure.kind == common.__name__ for failure in failures.values()):
            return common(f"round {round_}: every unit failed: {causes}")
    return RoundFailedError(f"round {round_}: every unit failed: {causes}")
