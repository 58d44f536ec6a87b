"""Store frozen tensors on disk by content hash, so that each is sent to a machine only once."""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from collapipe.errors import ConfigError, DataError, WireError, one_line
from collapipe.process.folders import in_home
from collapipe.tensors import Tensors

_DIGEST = re.compile(r"[0-9a-f]{64}")


def default_folder() -> Path:
    """Return ``collapipe/frozen`` in the user's cache, ``$XDG_CACHE_HOME`` or ``~/.cache``.

    ``~`` is expanded only when a file is stored, because other runs need no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG standard says to ignore a relative path
    root = Path(cache) if Path(cache).is_absolute() else Path("~/.cache")
    return root / "collapipe" / "frozen"


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (64 hex digits) of names, dtypes, shapes and bytes, in any order."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)])  # one line
        content.update(f"{head}\n".encode())
        content.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


@dataclass(frozen=True, slots=True)
class FrozenStore:
    """A folder of safetensors files, each named by the digest of its tensors.

    ``folder`` may begin with ``~``. Any number of processes may use it at once. Only damaged files
    are removed, and beyond ``limit_bytes`` the least recently used ones.
    """

    folder: Path
    limit_bytes: float = math.inf

    def lacks(self, digests: Iterable[str]) -> list[str]:
        """Return the ``digests`` without a valid file, and remove damaged files.

        Raises ``WireError`` for an invalid digest.
        """
        lacking = []
        for name in digests:
            try:
                self.load(name)
            except DataError:
                lacking.append(name)
        return lacking

    def add(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Store ``tensors`` atomically and return their digest, so that the caller can check it.

        Raises ``ConfigError`` if the folder cannot be written.
        """
        name = digest(tensors)
        if (file := self._file(name)).exists():
            return name
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(file.parent, sum(each.nbytes for each in tensors.values()))
            with tempfile.TemporaryDirectory(".partial", name[:8], file.parent) as folder:
                partial = Path(folder) / file.name
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial)
                if digest(load(partial.read_bytes())) != name:
                    raise OSError("the written file reads differently")
                with partial.open("rb+") as written:
                    os.fsync(written.fileno())
                partial.replace(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file}: cannot keep frozen weights ({error}); make room, or set XDG_CACHE_HOME "
                "to a folder that can be written"
            ) from error
        return name

    def load(self, name: str) -> Tensors:
        """Return the tensors with the digest ``name``.

        Raises ``DataError`` if the file is missing, unreadable or damaged, and removes a damaged
        one.
        """
        file = self._file(name)
        try:
            tensors = load(file.read_bytes())  # a copy: later writes to the file do not change it
        except FileNotFoundError as error:
            raise DataError(f"{file}: frozen weights are missing; send them again") from error
        except OSError as error:
            raise DataError(f"{file}: cannot read frozen weights ({error}); fix that") from error
        except (SafetensorError, KeyError) as error:  # a type that torch lacks
            cause = one_line(error)
        else:
            if digest(tensors) == name:
                with suppress(OSError):
                    os.utime(file)  # used now
                return tensors
            cause = "its content has another digest"
        with suppress(OSError):
            file.unlink()
        raise DataError(f"{file}: frozen weights were damaged ({cause}) and are removed; run again")

    def _make_room(self, folder: Path, size: float) -> None:
        files = [(each.stat(), each) for each in folder.glob("*.safetensors")]
        kept = sum(stat.st_size for stat, _ in files)
        for stat, file in sorted(files, key=lambda each: each[0].st_mtime_ns):
            if kept + size <= self.limit_bytes:
                return
            file.unlink(missing_ok=True)
            kept -= stat.st_size

    def _file(self, name: str) -> Path:
        """Return a digest's file. Raises ``WireError`` for any other text, such as a path."""
        if not _DIGEST.fullmatch(name):
            raise WireError(f"digest of frozen weights {name[:80]!r}: must be 64 hex digits")
        return Path(in_home(str(self.folder))) / f"{name}.safetensors"
