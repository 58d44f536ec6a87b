"""Cache a frozen stem's activations on disk, one file per row, so that later epochs reuse them."""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from collapipe import __version__
from collapipe.home import in_home
from collapipe.wire.frozen_store import default_folder, digest

_log = logging.getLogger(__name__)
_ACTIVATION, _DIGEST = "activation", "sha256"
_ABANDONED_S = 3600.0  # age of a partial file to remove; writing a row takes less than a second
_LIBRARIES = "torch", "transformers"


def activation_folder(stem: str, model: object, device: torch.device) -> Path:
    """Return ``collapipe/activations/KEY`` in the user's cache.

    The key covers everything except the row that affects an activation's bits. These are the digest
    ``stem`` of the frozen weights and their types, the ``model``'s options, the libraries'
    versions, the number of threads, the machine and its ``device``.
    """
    made_by = [platform.node(), str(device), torch.get_num_threads()]
    made_by += [__version__, *map(version, _LIBRARIES)]
    config = getattr(model, "own_config", None)  # Hugging Face models: options beyond the weights
    key = hashlib.sha256(json.dumps([stem, repr(model), repr(config), made_by]).encode())
    cache = Path(in_home(str(default_folder().parent)))
    return cache / "activations" / key.hexdigest()


class ActivationStore:
    """A folder of safetensors files, each named by the digest of a row's token ids.

    Any number of units may use it at once, because all write the same bits for a row.
    ``limit_bytes`` bounds the size of all files. Units that write at the same time may exceed it
    until each makes a new store. A row without a valid file is computed again. Activations may be
    on any device; ``load`` returns them on the CPU.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        self._left: int | None = None  # bytes; None: not measured yet

    def load(self, ids: Tensor) -> Tensor | None:
        """Return a row's activation; None if it is missing or damaged. Removes a damaged file."""
        file = self._file(ids)
        try:
            tensors = load(file.read_bytes())  # a copy: later writes to the file do not change it
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError) as error:  # a type that torch lacks
            tensors, cause = {}, str(error)
        else:
            cause = "its content has another digest"
        if tensors.keys() == {_ACTIVATION, _DIGEST}:
            activation = tensors[_ACTIVATION]
            if torch.equal(tensors[_DIGEST], _check(file, activation)):
                return activation
        _log.warning("%s: %s; the row is computed again", file, cause)
        with suppress(OSError):
            file.unlink()
        return None

    def keep(self, ids: Tensor, activation: Tensor) -> None:
        """Write a row's activation if ``limit_bytes`` allows it; log a warning if writing fails."""
        file, own = self._file(ids), activation.cpu().contiguous()
        data = save({_ACTIVATION: own, _DIGEST: _check(file, own)})
        try:
            if self._left is None:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._left = self._limit_bytes - _size(self.folder)
            if len(data) <= self._left:
                self._left -= len(data)
                _write(file, data)
        except OSError as error:
            self._left = 0
            _log.warning("%s: no more activations are kept in this round (%s)", file, error)

    def _file(self, ids: Tensor) -> Path:
        row = hashlib.sha256(ids.cpu().contiguous().numpy().data).hexdigest()
        return self.folder / f"{row}.safetensors"


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, and remove partial files of killed processes."""
    size, now = 0, time.time()
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # a partial file that was renamed meanwhile
            told = file.stat()
            if file.name.startswith(".") and now - told.st_mtime > _ABANDONED_S:
                file.unlink()
            else:
                size += told.st_size
    return size


def _write(file: Path, data: bytes) -> None:
    """Write a file atomically, because another unit may read the same row meanwhile."""
    number, name = tempfile.mkstemp(dir=file.parent, prefix=".")
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(data)
        partial.replace(file)
    except BaseException:  # also on an interrupt, or the file would remain
        partial.unlink()
        raise


def _check(file: Path, activation: Tensor) -> Tensor:
    """Return the digest of an activation and its row, uint8 [32]."""
    return torch.frombuffer(bytearray.fromhex(digest({file.stem: activation})), dtype=torch.uint8)
