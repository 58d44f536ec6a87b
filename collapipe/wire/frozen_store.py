"""Store frozen tensors on disk by content hash, so that each is sent to a machine only once."""

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from collapipe.errors import ConfigError, DataError, WireError, one_line
from collapipe.process.files import make_folder, replace, replacing
from collapipe.process.folders import in_home
from collapipe.tensors import ALIGNMENT, Tensors
from collapipe.wire.parts import DAMAGED, pieces, raw

_NOTE_BYTES = 64
_MOST_KNOWN = 10_000  # a device runs for months and gets new files with each model
_DIGEST = re.compile(r"[0-9a-f]{64}")
_known = dict[Hashable, str]()  # digests that this process has computed, by the state of files


def default_folder() -> Path:
    """Return ``collapipe/frozen`` in the user's cache, ``$XDG_CACHE_HOME`` or ``~/.cache``.

    ``~`` is expanded only when a file is stored, because other runs need no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG standard says to ignore a relative path
    root = Path(cache) if Path(cache).is_absolute() else Path("~/.cache")
    return root / "collapipe" / "frozen"


def _is_own(path: Path) -> bool:
    """Whether only this process's user may write to the file or folder. Raises ``OSError``."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (64 hex digits) of names, dtypes, shapes and bytes, in any order."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])  # one line
        content.update(f"{head}\n".encode())
        content.update(raw(tensor))
    return content.hexdigest()


def state_of(*files: Path) -> Hashable:
    """Return a key that changes when one of the files is written. Take it before reading them."""
    found = (file.stat() for file in files)
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def digest_once(tensors: Mapping[str, torch.Tensor], source: Hashable) -> str:
    """Return ``digest``, computed once in this process for tensors of these names and types.

    ``source`` is a key of the tensors in their files and of the files' state.
    """
    key = source, tuple(sorted((name, str(each.dtype)) for name, each in tensors.items()))
    if (found := _known.get(key)) is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = digest(tensors)
    return found


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """A folder of safetensors files, each named by the digest of its tensors.

    ``folder`` may begin with ``~``. Any number of processes may use it at once. Only damaged files
    are removed, and beyond ``limit_bytes`` the least recently used ones. A process checks a file
    again only if it was written since.
    """

    folder: Path
    limit_bytes: float = math.inf
    is_cache: bool = True  # otherwise a damaged file stays: it may be the only copy

    def add(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Store ``tensors`` atomically and return their digest, so that the caller can check it.

        Raises ``ConfigError`` if the folder cannot be written.
        """
        name = digest(tensors)
        file = self._file(name)
        try:
            if file.exists():
                return name
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(file.parent, sum(each.nbytes for each in tensors.values()))
            with replacing(file) as partial:
                with partial.open("wb") as written:
                    # mapped tensors are aligned if those before them fill whole steps
                    last = sorted(tensors, key=lambda key: tensors[key].nbytes % ALIGNMENT != 0)
                    ordered = {key: tensors[key] for key in last}
                    written.writelines(pieces(ordered, ALIGNMENT))
                if digest_once(load_file(partial), state_of(partial)) != name:
                    raise OSError("the written file reads differently")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file}: cannot keep frozen weights ({error}); make room, or choose another "
                "folder, for a cache by XDG_CACHE_HOME"
            ) from error
        return name

    def load(self, name: str) -> Tensors:
        """Return the tensors with the digest ``name``, mapped from the file.

        Raises ``DataError`` if the file is missing, unreadable or damaged, and removes a damaged
        one.
        """
        file = self._file(name)
        try:
            state, tensors = state_of(file), load_file(file)
        except FileNotFoundError as error:
            raise DataError(
                f"{file}: frozen weights are missing; run again, and they are sent anew"
            ) from error
        except OSError as error:
            raise DataError(f"{file}: cannot read frozen weights ({error}); fix that") from error
        except DAMAGED as error:
            cause = one_line(error)
        else:
            if digest_once(tensors, state) == name:
                with suppress(OSError):
                    os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))  # used now
                return tensors
            cause = "its content has another digest"
        if not self.is_cache:
            raise DataError(f"{file}: frozen weights are damaged ({cause}); restore the file")
        with suppress(OSError):
            file.unlink()
        raise DataError(f"{file}: frozen weights were damaged ({cause}) and are removed; run again")

    def remember(self, source: str, name: str) -> None:
        """Note that the tensors with the digest ``name`` were made of ``source``.

        Raises ``ConfigError`` if the folder cannot be written.
        """
        file = self._note(source)
        make_folder(file.parent)
        replace(file, name.encode())

    def recall(self, source: str) -> str | None:
        """Return the digest that ``remember`` noted; None if there is none.

        Whoever writes notes chooses weights. So others' notes count as none, and so do those in a
        folder or file that others may write to.
        """
        with suppress(OSError, ConfigError, UnicodeDecodeError):
            file = self._note(source)
            if _is_own(file.parent) and _is_own(file):
                with file.open("rb") as opened:
                    name = opened.read(_NOTE_BYTES + 1).decode()
                return name if _DIGEST.fullmatch(name) else None
        return None

    def _note(self, source: str) -> Path:
        name = hashlib.sha256(source.encode()).hexdigest()
        return Path(in_home(str(self.folder))) / f"{name}.made"

    def _make_room(self, folder: Path, size: float) -> None:
        files = list[tuple[os.stat_result, Path]]()
        for each in folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process needed the room
                files.append((each.stat(), each))
        kept = sum(found.st_size for found, _ in files)
        for found, file in sorted(files, key=lambda each: each[0].st_atime_ns):
            if kept + size <= self.limit_bytes:
                return
            file.unlink(missing_ok=True)
            kept -= found.st_size

    def _file(self, name: str) -> Path:
        """Return a digest's file. Raises ``WireError`` for any other text, such as a path."""
        if not _DIGEST.fullmatch(name):
            raise WireError(f"digest of frozen weights {name[:80]!r}: must be 64 hex digits")
        return Path(in_home(str(self.folder))) / f"{name}.safetensors"
