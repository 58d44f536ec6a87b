"""The exit status of a command; each error is one line on standard error."""

import logging
from collections.abc import Callable
from pathlib import Path

import click
import typer

from collapipe.errors import CollaPipeError, one_line, printable
from collapipe.own_packages import error_of_plugin
from collapipe.process.extras import missing
from collapipe.process.streams import complain

INTERRUPTED = 130
# Problems of the machine, not bugs: a library without memory for its code is an ImportError, and
# Python without memory raises SystemError.
_FAULTS = OSError, UnicodeEncodeError, MemoryError, ImportError, SystemError
_NO_THREAD = "can't start new thread"  # a RuntimeError
_log = logging.getLogger(__name__)


class Reported(int):
    """The exit status of another command, which has printed its error itself."""


def status_of(command: Callable[[], int]) -> int:
    """Run a command, print its error, and return the exit status. Errors in our code are raised."""
    try:
        return command()
    except typer.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CollaPipeError as error:
        complain(f"error: {printable(str(error))}")
        return error.exit_status
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        return CollaPipeError.exit_status
    except _FAULTS as error:
        _log.debug("raised here", exc_info=error)
        complain(f"error: {_cause(error)}")
        return CollaPipeError.exit_status
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # click has ended the command
            return CollaPipeError.exit_status
        complain(f"error: code of your own ended the command with sys.exit({error.code!r})")
        return CollaPipeError.exit_status
    except Exception as error:
        if str(error) == _NO_THREAD:
            complain(f"error: {_NO_THREAD}: no process or memory is left; raise ulimit -u or -v")
            return CollaPipeError.exit_status
        if (plugin_error := error_of_plugin(error)) is None:
            raise
        _log.debug("raised here", exc_info=error)
        complain(f"error: {plugin_error}; collapipe --verbose … shows more")
        return CollaPipeError.exit_status


def _cause(error: Exception) -> str:
    try:
        Path.cwd()
    except OSError:
        return "the current folder is gone; change to another one"
    if isinstance(error, ModuleNotFoundError):
        return missing(error.name or str(error))
    cause = "no memory is left" if isinstance(error, MemoryError) else one_line(error)
    if isinstance(error, SystemError):
        cause = f"Python failed, perhaps without memory ({cause})"
    return f"{cause}; collapipe --verbose … shows where"
