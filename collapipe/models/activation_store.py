"""Activations behind a frozen stem on disk, a file for each row, so that later epochs skip it."""

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
_ABANDONED_S = 3600.0  # since a partial file was last written: a row takes no second
_LIBRARIES = "torch", "transformers"


def activation_folder(stem: str, model: object, device: torch.device) -> Path:
    """``collapipe/activations/KEY`` in the user's cache.

    The key is of all that an activation's bits depend on but the row: the digest ``stem`` of the
    frozen weights, their types among it, the ``model``'s options, the libraries, the number of
    threads, the machine, and its ``device``.
    """
    made_by = [platform.node(), str(device), torch.get_num_threads()]
    made_by += [__version__, *map(version, _LIBRARIES)]
    config = getattr(model, "own_config", None)  # of transformers: of more than its weights tell
    key = hashlib.sha256(json.dumps([stem, repr(model), repr(config), made_by]).encode())
    cache = Path(in_home(str(default_folder().parent)))
    return cache / "activations" / key.hexdigest()


class ActivationStore:
    """A folder of safetensors files, each named by the digest of a row's token ids.

    Any number of units may use it at once: what two write of a row is the same. ``limit_bytes`` is
    of all files there; units that write at the same time may pass it by what they write until each
    has a new store. What is not kept, for want of room or because a file was damaged, is
    computed again. Activations of any device are taken; they are given back on the CPU.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        self._left: int | None = None  # bytes; None: nobody has asked yet

    def load(self, ids: Tensor) -> Tensor | None:
        """The activation of a row, None where it is not here, or damaged and now removed."""
        file = self._file(ids)
        try:
            tensors = load(file.read_bytes())  # a copy: nobody's writing changes it later
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError) as error:  # a type that torch has not
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
        """Write a row's activation while there is room; a disk that is full is said in the log."""
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
    """Bytes of all files there, while others write. What a writer that was killed left is gone."""
    size, now = 0, time.time()
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # it has its name by now
            told = file.stat()
            if file.name.startswith(".") and now - told.st_mtime > _ABANDONED_S:
                file.unlink()
            else:
                size += told.st_size
    return size


def _write(file: Path, data: bytes) -> None:
    """At once, for a unit that has the same row may read it meanwhile."""
    number, name = tempfile.mkstemp(dir=file.parent, prefix=".")
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(data)
        partial.replace(file)
    except BaseException:  # an interrupt, too: nobody would remove it later
        partial.unlink()
        raise


def _check(file: Path, activation: Tensor) -> Tensor:
    """uint8 [32], the digest of an activation and of the row that it belongs to."""
    return torch.frombuffer(bytearray.fromhex(digest({file.stem: activation})), dtype=torch.uint8)
