"""Write files atomically and with safe modes, and never overwrite one by mistake."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from shlex import quote
from stat import S_IMODE

from collapipe.errors import ConfigError, cause_of

PRIVATE, PUBLIC = 0o600, 0o644
PARTIAL = ".*.partial"  # pattern of the files that killed processes may leave
_LARGEST = 2**20


def read(file: Path, way_out: str, private: bool = False) -> bytes:
    """Return the file's content.

    Raises ``ConfigError`` if it cannot be read or is longer than 1 MiB. Also raises it if the file
    is ``private`` and its mode lets other users read it.
    """
    try:
        with file.open("rb") as stream:
            mode = S_IMODE(os.fstat(stream.fileno()).st_mode)
            content = stream.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {way_out}") from error
    if len(content) > _LARGEST:
        raise ConfigError(f"{file}: is longer than {_LARGEST:,} bytes; {way_out}")
    if private and mode & 0o077:
        way_out = f"chmod 600 {quote(str(file))}"
        raise ConfigError(f"{file}: has mode {mode:o}, others may read the key; {way_out}")
    return content


def write_new(file: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a new file. Raises ``ConfigError`` if it exists."""
    with _storage_errors(file), replacing(file, mode, new=True) as partial:
        partial.write_bytes(content)


def replace(file: Path, content: bytes, mode: int = PUBLIC) -> None:
    """Write a file, or replace an existing one. Raises ``ConfigError`` if that fails."""
    with _storage_errors(file), replacing(file, mode) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(
    file: Path, mode: int = 0o666, durable: bool = True, new: bool = False
) -> Iterator[Path]:
    """Yield an empty file in the same folder, which becomes ``file`` when the context ends.

    Its mode is ``mode`` within the umask. After an error it is removed, and ``file`` is unchanged.
    A ``durable`` file survives a power failure. Any number of threads and processes may do this at
    once. Raises ``OSError``, also if the file is to be ``new`` and exists.
    """
    partial = file.with_name(f".{file.name}.{token_hex(4)}.partial")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        mode = S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(mode)  # safetensors makes a file of another mode
        if durable:
            sync(partial)
        if new:
            os.link(partial, file)  # fails if the file exists
            partial.unlink()
        else:
            partial.replace(file)
        if durable:
            sync(file.parent)  # else a power failure could undo the new name
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that it survives a power failure. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder with mode 700; it gets the name ``folder`` when the context ends.

    The temporary folder is removed after an error, and a ``ConfigError`` names ``folder`` in its
    place. Raises ``ConfigError`` if ``folder`` is a file or a folder that is not empty.
    """
    with _storage_errors(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise FileExistsError(errno.EEXIST, "exists and is no empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        with _storage_errors(folder):
            partial.rename(folder)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(partial), str(folder))) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder with mode 700 if it does not exist."""
    with _storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({cause_of(error)}); nothing is overwritten, choose "
            "another place"
        ) from error
