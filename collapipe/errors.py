"""One tree of errors. Each message is one line: what, where, the value, and the way out."""


class CollaPipeError(Exception):
    """Root of every error that CollaPipe raises on purpose; ends the command with status 1."""

    exit_status = 1


class ConfigError(CollaPipeError):
    """An option, a file or a combination of them cannot be used; nothing was started."""

    exit_status = 2


class DataError(ConfigError):
    """A data folder, file or line cannot be read as the task needs it."""


class InfeasibleRoundError(CollaPipeError):
    """No plan satisfies the round's constraints."""


class PlanViolationError(CollaPipeError):
    """A solver's answer breaks a constraint, or its certificate claims what is not so."""


class ScheduleError(CollaPipeError):
    """A schedule is incomplete or would wait for ever."""


class WireError(CollaPipeError):
    """Bytes or records from another machine do not say what they should."""


class LinkError(CollaPipeError):
    """The decoder link broke, was refused or was closed."""


class CancelledRoundError(CollaPipeError):
    """The round's time ended, or the run was stopped, before the work was done."""


class NonFiniteLossError(CollaPipeError):
    """A loss became NaN or infinite; the run stops and the last good weights stay."""


class RoundFailedError(CollaPipeError):
    """Every unit of a round failed; the message names the cause of each."""
