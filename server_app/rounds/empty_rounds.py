"""Rounds in which no unit finished: the next one may have others, so that a few are skipped."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from collapipe.errors import (
    CollaPipeError,
    NonFiniteLossError,
    RoundFailedError,
    StorageError,
    few_of,
)
from collapipe.wire.messages import Failure

_MOST = 10  # such rounds in a row


@dataclass
class EmptyRounds:
    """Those since a unit last finished a round, and why units failed in them."""

    _rounds: int = 0
    _failures: dict[int, Failure] = field(default_factory=dict)

    def add(self, round_: int, failures: Mapping[int, Failure], present: Set[int]) -> str:
        """Why the round is skipped, all of whose units failed; ``present`` could have been chosen.

        Raises what ends the run where all of these have failed by now, one after the other, or it
        is the tenth such round: a unit that fails by itself must not end everybody's run, and one
        that the strategy always chooses must not go on for ever.
        """
        self._rounds += 1
        self._failures |= failures
        if present <= self._failures.keys() or self._rounds >= _MOST:
            raise _nobody_finished(round_, self._failures)
        return "every unit failed"

    def clear(self) -> None:
        """A unit has finished a round."""
        self._rounds = 0
        self._failures.clear()


def _nobody_finished(round_: int, failures: Mapping[int, Failure]) -> CollaPipeError:
    for common in (NonFiniteLossError, StorageError):
        if all(failure.kind == common.__name__ for failure in failures.values()):
            return common(next(iter(failures.values())).message)
    causes = few_of(f"unit {unit}: {f.kind}: {f.message}" for unit, f in sorted(failures.items()))
    return RoundFailedError(f"round {round_}: every unit failed: {causes}")
