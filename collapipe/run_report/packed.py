"""Read a run's compressed files of a line a round: the planner's requests, the devices' traces."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from collapipe.errors import ConfigError
from collapipe.runs.folder import REQUESTS
from collapipe.runs.reading import Run
from collapipe.validation import fault_of
from optim.planner import RoundRequest

T = TypeVar("T")
_REQUEST = TypeAdapter(RoundRequest)
_LONGEST = 2**26  # of a line, in bytes; a thousand units of a dozen devices need a tenth


def read_requests(run: Run, number: int | None = None) -> Iterator[RoundRequest]:
    """Yield the planner's requests of a run's rounds as ``read_packed``."""
    return read_packed(run, REQUESTS, _REQUEST, _LONGEST, number)


def request_of(run: Run, number: int) -> RoundRequest | None:
    """Return the planner's request of a finished round; None if the run's file was deleted.

    Raises ``ConfigError`` if the file is damaged or lacks the round.
    """
    request, file = next(read_requests(run, number), None), run.folder / REQUESTS
    if request is None and file.exists():
        raise ConfigError(f"{file}: lacks round {number}; restore it, or delete it to omit plans")
    return request


def read_packed(
    run: Run, name: str, kind: TypeAdapter[T], longest: int, number: int | None
) -> Iterator[T]:
    """Yield the lines of a run's compressed file, or only the lines of round ``number``.

    Yields nothing without a file. A line that is cut off is still being written, unless the run has
    completed. A small file may unpack to a huge line or to endless lines. So a line has less than
    ``longest`` bytes, and the number of lines is bounded by the run's rounds. Raises
    ``ConfigError`` if the file is damaged.
    """
    file, beginning = run.folder / name, b"" if number is None else b'{"round":%d,' % number
    completed = run.summary is not None and run.summary.completed
    missing = [FileNotFoundError] if completed else [FileNotFoundError, EOFError]
    try:
        with suppress(*missing), gzip.open(file) as lines:
            most = len(run.rounds) + 1  # one more, to see the file's end
            for text in islice(iter(partial(lines.readline, longest), b""), most):
                if len(text) == longest:
                    raise OSError("a line without end")
                if text.startswith(beginning):
                    yield kind.validate_json(text)
    except (OSError, EOFError, zlib.error, ValidationError, ConfigError) as error:
        where = f"{file}: " if number is None else f"{file}: round {number}: "
        raise ConfigError(
            f"{where}not what a run writes ({fault_of(error)}); restore or delete it"
        ) from error
