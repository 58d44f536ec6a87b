"""The tree of errors. Each message is one line: problem, place, value, and how to correct it."""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager


class CollaPipeError(Exception):
    """Root of every error that CollaPipe raises on purpose; ends the command with status 1."""

    exit_status = 1


class ConfigError(CollaPipeError):
    """An option, a file or a combination of them cannot be used; nothing was started."""

    exit_status = 2


class DataError(ConfigError):
    """A data folder, file or line cannot be read as the task needs it.

    ``public_message`` is a message without values and paths, which the server may see.
    """

    def __init__(self, message: str, public_message: str = "its rows cannot be read") -> None:
        super().__init__(message)
        self.public_message = public_message


class NoRowsError(DataError):
    """Rows are missing: no file is configured, or the file does not exist."""


class OwnerError(CollaPipeError):
    """A unit refuses a request that its owner forbids, or cannot use its owner's settings."""


class InfeasibleRoundError(CollaPipeError):
    """No plan satisfies the round's constraints.

    ``queues`` are Y_n(t+1) of all units if the round is skipped; empty if none are kept.
    """

    def __init__(self, message: str, queues: tuple[float, ...] = ()) -> None:
        super().__init__(message)
        self.queues = queues


class UnfinishedSearchError(InfeasibleRoundError):
    """A search ended without a plan, though there may be one."""


class PlanViolationError(CollaPipeError):
    """A solver's answer violates a constraint, or its certificate is wrong."""


class ScheduleError(CollaPipeError):
    """A schedule is incomplete or has a deadlock."""


class WireError(CollaPipeError):
    """Bytes or records from another machine are invalid."""


class LinkError(CollaPipeError):
    """A link to another machine broke, was refused or was closed."""


class RefusedUnitError(LinkError):
    """The server has not admitted the unit: restarting the unit does not help before that."""

    exit_status = 4


class BrokenLinkError(LinkError):
    """A stream ended unexpectedly; opening it again may help."""


class BusyLinkError(LinkError):
    """The peer serves another caller; dialling again later may help."""


class RefusedLinkError(LinkError):
    """The peer does not serve this caller; dialling again does not help."""


class StageError(CollaPipeError):
    """A device of the cluster is lost or cannot continue."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(f"{device}: {cause}")
        self.device, self.cause = device, cause


class DeviceMemoryError(CollaPipeError):
    """A segment needs more memory than its device offers."""


class CancelledRoundError(CollaPipeError):
    """The round's time ended, or the run was stopped, before the work was done."""


class NonFiniteLossError(CollaPipeError):
    """A loss became NaN or infinite; its unit is excluded from the round."""


class RoundFailedError(CollaPipeError):
    """A unit's round, or the round of all units, failed; the message names causes."""


class BudgetSpentError(CollaPipeError):
    """A further round would exceed a limit on ε; the model trained until then stays."""


class StorageError(CollaPipeError):
    """The local disk cannot be written; earlier files stay valid."""


@contextmanager
def faults_of(where: object) -> Iterator[None]:
    """Begin the message of a ``ConfigError`` that is raised inside with ``where``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


WAY_OUT_AFTER_AGGREGATION = "lower optimizer.lr or server_optimizer.lr, or the noise"
"""What to do if the averaged model is unusable."""


def way_out_of_divergence(step: int) -> str:
    """Return what to do if a local ``step``, from 0, has a loss or gradient that is not finite."""
    if step:
        return "lower optimizer.lr or set optimizer.clip_norm"
    return "nothing was trained before, so replace the first weights or the rows"


_MOST = 400  # characters of another machine's or library's message
_READ = 2**14  # first characters of it that are read; each takes up to a microsecond
_FEW = 3  # causes or units that a message names
_UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})  # Unicode's categories
# The embeddings, overrides and isolates of UAX 9, by which a name can look like another one.
_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def is_printable(text: str) -> bool:
    """Whether a text fits on one line of a terminal and is displayed in its written order.

    Control characters, breaks of lines and paragraphs, surrogates, and characters that reorder
    others are refused. Other format characters are allowed, because Persian words and emoji
    families contain joiners, and so are characters that are newer than this Python's Unicode.
    """
    return text.isprintable() or not (
        _REORDERING & {*text} or _UNPRINTABLE & {*map(unicodedata.category, text)}
    )


def printable(text: str) -> str:
    """Return a text in one line, without characters that control a terminal."""
    return " ".join("".join(c if is_printable(c) else " " for c in text).split())


def one_line(text: object) -> str:
    """Return a message of another machine or library as one printable line of limited length.

    An exception without a message gives its class name.
    """
    line = printable(str(text)[:_READ])
    if not line and isinstance(text, Exception):
        line = type(text).__name__
    return line if len(line) <= _MOST else f"{line[:_MOST]} …"


def written(value: object) -> str:
    """Return an option's value in one line, as YAML and command lines write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else one_line(value)


def cause_of(error: Exception) -> str:
    """Return an error's message in one line, that of an ``OSError`` without its number and path."""
    return (isinstance(error, OSError) and error.strerror) or one_line(error)


def few_of(texts: Iterable[str], between: str = "; ") -> str:
    """Return the first three different texts, and the number of further ones."""
    different = [*dict.fromkeys(texts)]
    more = f" and {len(different) - _FEW} more" if len(different) > _FEW else ""
    return between.join(different[:_FEW]) + more


Called = Callable[[int], str]
"""Unit number → the name that users see."""


def unit_called(unit: int, name: str = "") -> str:
    """Return a unit's name in its certificate or its owner's file, or else such as ``unit 0``."""
    return printable(name) or f"unit {unit}"


def by_cause(causes: Mapping[int, str], called: Called) -> Iterator[tuple[str, str]]:
    """Yield the first units of each cause, with the number of further ones, and the cause without
    the unit's number."""
    own = {unit: printable(why).replace(f"unit {unit}: ", "") for unit, why in causes.items()}
    for cause in dict.fromkeys(own.values()):
        yield few_of((called(unit) for unit, why in own.items() if why == cause), ", "), cause
