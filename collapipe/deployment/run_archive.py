"""Send a run's folder as a tar archive from the server to the machine that submitted the run."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from typing import IO

from collapipe.errors import StorageError
from collapipe.runs.folder import check_plain
from collapipe.runs.lock import LOCK

_PIECE = 2**20
_MOST_BYTES, _MOST_MEMBERS = 2**36, 100_000  # of an archive to unpack


def pack(folder: Path) -> Iterator[bytes]:
    """Yield the archive in pieces. Raises ``ConfigError`` for links and special files."""
    check_plain(folder)
    return _pieces(folder)


def _pieces(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.rglob("*")):
        if path.name != LOCK:
            yield from _member(path, path.relative_to(folder).as_posix())
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(path: Path, name: str) -> Iterator[bytes]:
    found, info = path.lstat(), tarfile.TarInfo(name)
    info.mtime, info.mode = found.st_mtime, S_IMODE(found.st_mode)
    if path.is_symlink():
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif path.is_dir():
        info.type = tarfile.DIRTYPE
    else:
        info.size = found.st_size
    yield info.tobuf()
    if info.size:
        yield from _content(path, info.size)


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as file:
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise StorageError(f"{path}: was cut while it was read")
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)


def unpack(archive: IO[bytes], folder: Path) -> int:
    """Unpack an archive of ``pack`` into ``folder``, and return the number of files.

    Raises ``tarfile.TarError`` or ``ConfigError`` if it would write elsewhere, or has links or
    special files. Raises ``StorageError`` if it is larger than any run.
    """
    size, count = 0, 0
    with tarfile.open(fileobj=archive, mode="r|") as members:
        for number, member in enumerate(members):
            size, count = size + member.size, count + member.isreg()
            if size > _MOST_BYTES or number >= _MOST_MEMBERS:
                raise StorageError(
                    f"more than {_MOST_BYTES:,} bytes or {_MOST_MEMBERS:,} files are sent"
                )
            members.extract(member, folder, filter="data")
    check_plain(folder)
    return count
