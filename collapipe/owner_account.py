"""The ε that all runs together have spent on an owner's rows; only the unit writes this account."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from collapipe.errors import BudgetSpentError, ConfigError
from collapipe.formatting import counted
from collapipe.privacy.accounting import composed_epsilon
from collapipe.process import files
from collapipe.sections import CountFrom0, PrivacySettings
from collapipe.validation import from_json

KEPT = "kept"  # folder next to the owner's file that a deployed unit may write
_Sum = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Spent:
    """Rounds whose updates were sent or about to be, and Σ 1/z² of their noise multipliers z.

    ``by_server`` sums rounds with noise from the server, ``by_units`` rounds with the units' noise.
    """

    rounds: CountFrom0
    by_server: _Sum
    by_units: _Sum

    def epsilon(self, delta: float) -> float:
        """Return ε of all these rounds, see ``collapipe.privacy.accounting``."""
        squared = self.by_server + self.by_units
        return composed_epsilon(squared, delta, self.by_units > 0) if squared else 0.0

    def after(self, privacy: PrivacySettings) -> "Spent":
        """Return the account after a further round of a run with noise."""
        field = f"by_{privacy.noise_by}"
        more = getattr(self, field) + privacy.noise_multiplier**-2
        return replace(self, rounds=self.rounds + 1, **{field: more})


_SPENT = TypeAdapter(Spent)


@dataclass(frozen=True, slots=True)
class OwnerAccount:
    """The account of the unit ``name`` in ``file``; it keeps ε at ``delta`` within ``limit``."""

    name: str
    file: Path
    limit: float
    delta: float

    def summary(self) -> str:
        """Return a line for the owner with ε so far and the limit. Raises as ``spent``."""
        spent = self.spent()
        return (
            f"ε = {spent.epsilon(self.delta):.3g} of privacy.lifetime_epsilon={self.limit:g} is "
            f"spent, in {counted(spent.rounds, 'round')} of all runs"
        )

    def check(self, privacy: PrivacySettings) -> None:
        """Raise ``BudgetSpentError`` if a further round of a run would exceed the limit, and
        ``ConfigError`` if the file cannot be read."""
        self._after(privacy)

    def charge(self, privacy: PrivacySettings) -> None:
        """Charge a further round, synced to disk, before its update is sent.

        So a sent round is never missing, even if the process is killed. Raises as ``check``.
        """
        with self._locked():
            content = _SPENT.dump_json(self._after(privacy), indent=2)
            files.replace(self.file, content + b"\n", files.PRIVATE)

    def spent(self) -> Spent:
        """Read the file; zeros before the first round. Raises ``ConfigError`` if it is invalid."""
        if not self.file.exists():
            return Spent(0, 0.0, 0.0)
        way_out = "restore it, for it bounds what further runs may spend"
        content = files.read(self.file, way_out)
        return from_json(_SPENT, self.file, content, "the account of a unit", f"; {way_out}")

    def _after(self, privacy: PrivacySettings) -> Spent:
        spent = self.spent()
        after = spent.after(privacy)
        if not (next_epsilon := after.epsilon(self.delta)) <= self.limit:  # also refuses NaN
            raise BudgetSpentError(
                f"{self.name} cannot take part: one more round would raise ε of all its runs from "
                f"{spent.epsilon(self.delta):.3g} to {next_epsilon:.3g}, above its owner's "
                f"privacy.lifetime_epsilon={self.limit:g}"
            )
        return after

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time use the file; its end frees the lock."""
        files.make_folder(self.file.parent)
        lock = self.file.with_name(f".{self.file.name}.lock")
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE)
        except OSError as error:
            raise ConfigError(f"{lock}: make it writable ({error.strerror})") from error
        with os.fdopen(number):
            fcntl.flock(number, fcntl.LOCK_EX)
            yield
