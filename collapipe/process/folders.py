"""The user's home, and temporary folders that are removed even if their process was killed."""

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from collapipe.errors import ConfigError

_NAME = re.compile(r"collapipe-[a-z]+-[a-z0-9_]{8}\.tmp")


def in_home(path: str) -> str:
    """Return the path with a leading ``~/`` replaced by the user's home folder.

    Raises ``ConfigError`` if the home folder is needed but unknown.
    """
    if not path.startswith("~/"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: this user has no home folder; write the whole path, or set HOME"
        ) from error


def with_home(arguments: Sequence[str]) -> list[str]:
    """Expand ``~`` in ``--option=~/x``, which shells do not do.

    Arguments after ``--`` belong to another command and do not change.
    """
    words = [*arguments]
    end = words.index("--") if "--" in words else len(words)
    for number, (option, equals, value) in enumerate(each.partition("=") for each in words[:end]):
        if option.startswith("--") and value.startswith("~/"):
            words[number] = f"{option}{equals}{in_home(value)}"
    return words


class TemporaryFolder:
    """A folder with mode 700 that exists until ``close`` or the end of the context or object.

    The folder is locked while it is in use, and the system frees the lock when the process ends.
    The next ``TemporaryFolder`` of this user removes folders of killed processes. ``purpose`` is
    one word of lower-case letters. Raises ``OSError`` if the folder cannot be made.
    """

    def __init__(self, purpose: str) -> None:
        for folder in Path(tempfile.gettempdir()).iterdir():
            if _NAME.fullmatch(folder.name):
                with suppress(OSError):  # another user's, or in use
                    _remove(folder, _locked(folder))
        # The first name does not match _NAME, so no process removes the folder before it is locked.
        made = Path(tempfile.mkdtemp(".tmp", f".collapipe-{purpose}-"))
        lock = _locked(made)
        self.path = made.rename(made.with_name(made.name[1:]))
        self._end = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove the folder."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _locked(folder: Path) -> int:
    """Return the descriptor that holds the lock. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder}: belongs to another user; set TMPDIR")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # a cancelled unit may still write there
    os.close(lock)
