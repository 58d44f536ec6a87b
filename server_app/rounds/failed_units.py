"""Units that fail rounds although they are there: when they may try again, and when nobody can."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Self

from collapipe.errors import (
    Called,
    CollaPipeError,
    NonFiniteLossError,
    RoundFailedError,
    StorageError,
    few_of,
)
from collapipe.wire.messages import Failure
from server_app.attendance import AWAY

_LONGEST_REST = 31  # rounds


@dataclass(frozen=True, slots=True)
class FailedUnits:
    """``in_a_row``: how many rounds each has failed since it finished one; it rests ``until`` that
    round, for 0, 1, 3, 7, … rounds, at most 31. ``causes`` of all since any unit finished a round.

    A strategy may choose the same unit again and again: one that fails by itself must not end
    everybody's run, nor take its rounds.
    """

    in_a_row: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)
    causes: dict[int, Failure] = field(default_factory=dict)

    def after(
        self, round_: int, failures: Mapping[int, Failure], finished: Collection[int]
    ) -> Self:
        """The same after a round. Of units that are away attendance is kept elsewhere."""
        there = {u for u, each in failures.items() if each.kind not in AWAY}
        in_a_row = {u: n for u, n in self.in_a_row.items() if u not in finished}
        in_a_row |= {unit: in_a_row.get(unit, 0) + 1 for unit in there}
        rests = {u: min(2 ** (in_a_row[u] - 1) - 1, _LONGEST_REST) for u in there}
        until = {unit: last for unit, last in self.until.items() if unit in in_a_row}
        until |= {unit: round_ + 1 + rest for unit, rest in rests.items()}
        return type(self)(in_a_row, until, {} if finished else {**self.causes, **failures})

    def resting(self, round_: int, present: Set[int]) -> dict[int, str]:
        """Those that take no part in this round, and why; nobody rests where all would."""
        units = [unit for unit, first in self.until.items() if unit in present and round_ < first]
        if present <= {*units}:
            return {}
        return {
            unit: f"failed {self.in_a_row[unit]} times in a row, rests until round "
            f"{self.until[unit]}"
            for unit in units
        }

    def check(self, round_: int, present: Set[int], called: Called) -> None:
        """Raise what ends the run where all units that are ``present`` have failed, one after the
        other, since any has finished a round."""
        if present <= self.causes.keys():
            raise _nobody_finished(round_, self.causes, called)


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
