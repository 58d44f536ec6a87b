"""Send a run's folder as a tar archive from the server to the machine that submitted the run."""

import secrets
import shutil
import ssl
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from stat import S_IMODE
from typing import IO, cast

from collapipe.credentials.addresses import host_and_port
from collapipe.deployment.server_folder import RUNS
from collapipe.errors import CollaPipeError, LinkError, StorageError, one_line
from collapipe.formatting import counted
from collapipe.runs.folder import LOCK, check_plain

_PIECE = 2**20
_MOST_BYTES, _MOST_MEMBERS = 2**36, 100_000  # of an archive to unpack
_TIMEOUT_S = 60.0
_FAILURES = CollaPipeError, OSError, HTTPException, tarfile.TarError, KeyError, ValueError
_LONGEST = 300


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
                raise StorageError(f"{path}: was cut while it was read; copy the folder by hand")
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
                    f"over {_MOST_BYTES:,} bytes or {_MOST_MEMBERS:,} files; copy it by hand"
                )
            members.extract(member, folder, filter="data")
    check_plain(folder)
    return count


def bring(home: Path, connection: str, run_id: str, run_dir: Path) -> None:
    """Download the folder of a run that has ended, unless the server wrote to the same folder.

    ``connection`` is the server's name in Flower's configuration in ``home``. A failure is printed
    and not raised, because it does not affect the run's result.
    """
    try:
        with closing(_dialled(home, connection)) as server:
            count = _bring(server, run_id, run_dir)
    except _FAILURES as error:
        why = one_line(f"{type(error).__name__}: {error}")
        print(f"folder       is where the server wrote it, not brought here: {why}", flush=True)
        return
    if count is not None:
        print(
            f"brought      {counted(count, 'file')} from the server's machine to {run_dir}",
            flush=True,
        )


def _dialled(home: Path, connection: str) -> HTTPSConnection:
    options = tomllib.loads((home / "config.toml").read_text())["superlink"][connection]
    host, port = host_and_port(options["address"])
    context = ssl.create_default_context(cafile=options.get("root-certificates"))
    return HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)


def _bring(server: HTTPSConnection, run_id: str, run_dir: Path) -> int | None:
    """Return the number of downloaded files; None if the server wrote to this folder."""
    with _marked(run_dir) as mark:
        server.request("GET", f"{RUNS}{run_id}?{mark}")
        answer = server.getresponse()
    if answer.status == HTTPStatus.NO_CONTENT:
        return None
    if answer.status != HTTPStatus.OK:
        text = answer.read(_LONGEST).decode(errors="replace")
        raise LinkError(f"the server answers {answer.status}: {text}")
    with tempfile.TemporaryDirectory(prefix=f".{run_dir.name}.", dir=run_dir.parent) as partial:
        count = unpack(cast(IO[bytes], answer), Path(partial))
        for each in sorted(Path(partial).iterdir()):
            target = run_dir / each.name
            if target.is_dir():  # an older one of a resumed run
                shutil.rmtree(target)
            each.rename(target)
    return count


@contextmanager
def _marked(run_dir: Path) -> Iterator[str]:
    """Make a file by which the server recognises that it wrote to this folder; yield its name."""
    mark = run_dir / f".{secrets.token_hex(16)}"
    mark.touch()
    try:
        yield mark.name
    finally:
        mark.unlink()
