"""Checkpoints on disk: whole or not there, and checked before anything is made of them.

::

    checkpoints/000010/state.json            everything but tensors; digests of both files
    checkpoints/000010/tensors.safetensors
    checkpoints/latest                       → 000010
    checkpoints/.000015.partial              being written, or what a killed run left of it
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from collapipe import __version__
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.tensors import Tensors
from server_app.checkpoints.checkpoint import (
    Checkpoint,
    flat,
    nested,
    progress_from_json,
    progress_to_json,
)

_FORMAT = 1
_STATE, _TENSORS, _LATEST, _PARTIAL = "state.json", "tensors.safetensors", "latest", ".partial"
_NAME = re.compile(r"[0-9]{6,}")
_ODD = (  # what reading a damaged one may come to
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
    SafetensorError,
    CollaPipeError,
)


class CheckpointFolder:
    """The checkpoints of the run in ``run_dir``, named by their rounds."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "checkpoints"

    def names(self) -> list[str]:
        """Of those that are there, oldest first."""
        found = [path.name for path in self._path.glob("*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=int)

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Add a checkpoint, then leave the last ``keep``."""
        name = name_of(checkpoint.progress.round)
        self._clear()
        partial = self._partial(name)
        try:
            partial.mkdir(parents=True)
            save_file(_apart(flat(checkpoint.training)), partial / _TENSORS)
            _sync(partial / _TENSORS)
            (partial / _STATE).write_text(_state_text(checkpoint, partial / _TENSORS))
            _sync(partial / _STATE)
            _sync(partial)
            partial.rename(self._path / name)
        except (OSError, SafetensorError):
            self._clear()  # the room is needed
            raise
        self._point_to(name)
        self._leave(keep)

    def read(self, name: str) -> Checkpoint:
        """Raises ``ConfigError`` where it is damaged, or of another version's format."""
        path = self._path / name
        try:
            return _read(path)
        except ConfigError:
            raise
        except _ODD as error:
            raise ConfigError(f"{path}: damaged, {_cause(error)}") from error

    def rewind(self, name: str, keep: int) -> None:
        """Later ones are given up: the run goes on from ``name``. Leave the last ``keep``."""
        self._clear()
        self._point_to(name)
        for other in self.names():
            if int(other) > int(name):
                self._remove(other)
        self._leave(keep)

    def _leave(self, keep: int) -> None:
        for old in self.names()[:-keep]:
            self._remove(old)

    def _point_to(self, name: str) -> None:
        link = self._path / f".{_LATEST}{_PARTIAL}"
        link.symlink_to(name)
        link.replace(self._path / _LATEST)
        _sync(self._path)

    def _remove(self, name: str) -> None:
        """Under its name there is all of it or nothing."""
        gone = self._partial(name)
        (self._path / name).rename(gone)
        shutil.rmtree(gone)

    def _clear(self) -> None:
        """What a killed run left half-done."""
        for path in self._path.glob(f".*{_PARTIAL}"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _partial(self, name: str) -> Path:
        return self._path / f".{name}{_PARTIAL}"


def name_of(round_: int) -> str:
    """Such as ``000010``."""
    return f"{round_:06}"


def _state_text(checkpoint: Checkpoint, tensors: Path) -> str:
    state = {
        "format": _FORMAT,
        "version": __version__,
        "tensors_sha256": _digest(tensors),
        "configuration": checkpoint.configuration,
        "progress": progress_to_json(checkpoint.progress),
    }
    plain = json.loads(json.dumps(state))  # keys as texts, as they are read
    return json.dumps({"sha256": _digest_of(plain), **plain}, indent=1) + "\n"


def _read(path: Path) -> Checkpoint:
    text = (path / _STATE).read_text(encoding="utf-8")
    state = json.loads(text, parse_constant=_no_figure)
    if state["format"] != _FORMAT:
        raise ConfigError(
            f"{path}: has format {state['format']}, of CollaPipe {state['version']}; this is "
            f"{__version__}, which reads format {_FORMAT}: go on with that version"
        )
    said = state.pop("sha256")
    for file, found, written in (
        (_STATE, _digest_of(state), said),
        (_TENSORS, _digest(path / _TENSORS), state["tensors_sha256"]),
    ):
        if found != written:
            raise ValueError(f"{file} is not what was written, by its SHA-256")
    progress, configuration = progress_from_json(state["progress"]), state["configuration"]
    if progress.round != int(path.name):
        raise ValueError(f"it is of round {progress.round}")
    if not isinstance(configuration, dict):
        raise TypeError("it has no configuration")
    return Checkpoint(configuration, progress, nested(load_file(path / _TENSORS)))


def _no_figure(constant: str) -> float:
    raise ValueError(f"{constant} is no figure of a run")


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror})"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"


def _apart(tensors: Tensors) -> Tensors:
    """Contiguous, none sharing memory with another, as the format wants them."""
    seen = set[int]()
    apart = {}
    for name, tensor in tensors.items():
        dense = tensor.contiguous()
        place = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if place in seen else dense
        seen.add(place)
    return apart


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """On the disk, whatever becomes of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
