"""Checkpoints on disk: whole or not there, and checked before anything is made of them.

There are no generators to keep: whatever is random is drawn from the seed, a purpose and the number
of the round or step, and so is the order of a unit's rows.

::

    checkpoints/000010/state.json            everything but tensors; digests of all files
    checkpoints/000010/tensors.safetensors   the server's
    checkpoints/000010/unit-3.safetensors    what unit 3 keeps between rounds
    checkpoints/latest                       → 000010
    checkpoints/.000015.partial              being written, or what a killed run left of it

A unit's file is written when its state arrives, and read when the unit is restored, so that memory
never has the states of all units.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from collapipe import __version__
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.runs.folder import RunFolder
from collapipe.tensors import Tensors, aligned
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import kept_file
from collapipe.wire.parts import pieces
from server_app.records.summary import History
from server_app.rounds.results import RunState, Store, TrainingState
from server_app.rounds.scheduler import SchedulerState
from server_app.units import Kept

_log = logging.getLogger(__name__)
_FORMAT = 3
_STATE, _TENSORS, _LATEST, _PARTIAL = "state.json", "tensors.safetensors", "latest", ".partial"
_NAME = re.compile(r"[0-9]{6,}")
_UNIT = re.compile(r"unit-(0|[1-9][0-9]*)\.safetensors")
# what reading a damaged one may come to
_ODD = (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError, CollaPipeError)
# How many keys lead to the tensors of each part of the server's ``TrainingState``.
_KEYS = {
    "weights": 0,
    "server_optimizer": 0,
    "own_models": 1,
    "heads": 1,
    "activations": 1,
    "update_norms": 0,
    "privacy": 0,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is after ``round``: seconds that all its parts have taken, its tokeniser's
    digest, the bytes of its files that grow, and which unit each name is, where units have any."""

    round: int
    wall_s: float
    tokenizer: str
    sizes: dict[str, int]
    scheduler: SchedulerState
    history: History
    names: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round; ``configuration`` is its resolved tree."""

    configuration: Mapping[str, Any]
    progress: Progress
    training: TrainingState

    @property
    def name(self) -> str:
        """Such as ``000010``."""
        return _name(self.progress.round)


PROGRESS = TypeAdapter(Progress)  # as JSON; numbers stay what they are


class CheckpointFolder:
    """The checkpoints of the run in ``run_dir``, named by their rounds."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "checkpoints"

    def names(self) -> list[str]:
        """List the checkpoints that are there, oldest first."""
        found = [path.name for path in self._path.glob("*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=int)

    def begin(self, name: str) -> None:
        """Make room for a checkpoint, which has its name once ``write`` has ended."""
        self.clear()
        self._partial(name).mkdir(parents=True)

    def add(self, name: str, unit: int, kept: Kept) -> None:
        """Write what a unit keeps to the checkpoint that was begun."""
        if tensors := kept_file.flat(kept):
            _save(tensors, self._partial(name) / f"unit-{unit}.safetensors")

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Complete a checkpoint that was begun, then leave the last ``keep``."""
        partial = self._partial(checkpoint.name)
        for unit, kept in checkpoint.training.units.items():
            self.add(checkpoint.name, unit, kept)
        _save(flat(checkpoint.training), partial / _TENSORS)
        (partial / _STATE).write_text(_state_text(checkpoint, partial))
        _sync(partial / _STATE)
        _sync(partial)
        partial.rename(self._path / checkpoint.name)
        self._point_to(checkpoint.name)
        self._remove(self.names()[:-keep])

    def read(self, name: str) -> Checkpoint:
        """Raises ``ConfigError`` where it is damaged, or of another version's format."""
        path = self._path / name
        try:
            return _read(path)
        except ConfigError:
            raise
        except _ODD as error:
            raise ConfigError(f"{path}: damaged, {_cause(error)}") from error

    @property
    def kept(self) -> "KeptFiles":
        """What units kept by the last checkpoint, whichever that is when it is read."""
        return KeptFiles(self._path / _LATEST)

    def rewind(self, name: str, keep: int) -> None:
        """Remove the checkpoints after ``name``, and leave the last ``keep``."""
        self.clear()
        self._point_to(name)
        self._remove([other for other in self.names() if int(other) > int(name)])
        self._remove(self.names()[:-keep])

    def _point_to(self, name: str) -> None:
        link = self._path / f".{_LATEST}{_PARTIAL}"
        link.symlink_to(name)
        link.replace(self._path / _LATEST)
        _sync(self._path)

    def _remove(self, names: Sequence[str]) -> None:
        """Rename each, then delete it: no name ever stands for half a checkpoint."""
        for name in names:
            shutil.rmtree((self._path / name).rename(self._partial(name)))

    def clear(self) -> None:
        """Remove what is half-done."""
        for path in self._path.glob(f".*{_PARTIAL}"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _partial(self, name: str) -> Path:
        return self._path / f".{name}{_PARTIAL}"


@dataclass(frozen=True, eq=False)
class KeptFiles(Mapping[int, Kept]):
    """What units keep, from the files of the checkpoint in ``folder``; each is read when asked for.

    Raises ``ConfigError`` if a file is damaged.
    """

    folder: Path

    def __getitem__(self, unit: int) -> Kept:
        file = self.folder / f"unit-{unit}.safetensors"
        if not file.exists():
            raise KeyError(unit)
        try:
            return kept_file.nested(load_file(file))
        except _ODD as error:
            raise ConfigError(f"{file}: damaged, {_cause(error)}") from error

    def __iter__(self) -> Iterator[int]:
        found = (_UNIT.fullmatch(path.name) for path in self.folder.glob("unit-*"))
        return iter(sorted(int(match[1]) for match in found if match))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RunCheckpoints:
    """The checkpoints of a run: every ``federation.checkpoint_every`` rounds, and after the last
    one, so that a run that is complete can be given more.

    If a checkpoint cannot be written, as when the disk is full, the run goes on without it, and the
    log says so.
    """

    def __init__(self, settings: Settings, folder: RunFolder, tokenizer: Tokenizer) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._files = CheckpointFolder(folder.path)
        self._stored: set[int] | None = None  # units, in the checkpoint that was begun

    def begin(self, round_: int) -> Store | None:
        """Begin the round's checkpoint; what stores units' states in it. None if none is due."""
        if not self._due(round_):
            return None
        self._stored = set()
        self._tried(round_, lambda: self._files.begin(_name(round_)))
        return lambda unit, kept: self._store(round_, unit, kept)

    def write(self, history: History, state: RunState, names: Mapping[str, int]) -> None:
        """Complete the round's checkpoint, if one is due. The round's lines and weights must be in
        the run's folder.

        A unit that is away, or whose state was refused, has in it its state by the checkpoint
        before.
        """
        if self._due(round_ := history.num_rounds):
            self._tried(round_, lambda: self._complete(history, state, names))
            self._stored = None

    def _due(self, round_: int) -> bool:
        every, last = self._settings.federation.checkpoint_every, self._settings.federation.rounds
        return bool(every) and (round_ % every == 0 or round_ == last)

    def _store(self, round_: int, unit: int, kept: Kept) -> bool:
        self._tried(round_, lambda: self._files.add(_name(round_), unit, kept))
        if self._stored is not None:
            self._stored.add(unit)
        return self._stored is not None

    def _complete(self, history: History, state: RunState, names: Mapping[str, int]) -> None:
        progress = Progress(
            history.num_rounds,
            time.perf_counter() - history.start,
            tokenizer_digest(self._tokenizer),
            self._folder.sizes(),
            state.scheduler,
            replace(history, start=0.0),
            dict(names),
        )
        federation, before = self._settings.federation, self._files.kept
        checkpoint = Checkpoint(self._settings.tree, progress, state.training)
        for unit in before.keys() & {*range(federation.num_units)} - (self._stored or set()):
            self._files.add(checkpoint.name, unit, before[unit])
        self._files.write(checkpoint, federation.keep)

    def _tried(self, round_: int, action: Callable[[], None]) -> None:
        """Do it unless the checkpoint was given up; give it up if that fails."""
        if self._stored is None:
            return
        try:
            action()
        except (CollaPipeError, OSError, KeyError) as error:
            self._stored = None
            self._files.clear()  # the room is needed
            _log.warning("round %d: no checkpoint is written: %s", round_, one_line(error))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Tells whether a tokeniser is still the one that the run began with."""
    return hashlib.sha256(tokenizer.pack().encode()).hexdigest()


def flat(training: TrainingState) -> Tensors:
    """The server's tensors under ``GROUP/NAME``, such as ``heads.2/head.weight/exp_avg``."""

    def named(path: str, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
        for key, value in tree.items():
            if isinstance(value, Tensor):
                yield f"{path}/{key}", value
            else:
                yield from named(f"{path}.{key}", value)

    return dict(pair for group in _KEYS for pair in named(group, getattr(training, group)))


def nested(tensors: Mapping[str, Any]) -> TrainingState:
    """The inverse of ``flat``. Raises ``ValueError`` for a name that ``flat`` does not make."""
    training = TrainingState()
    for full, tensor in tensors.items():
        path, _, name = full.partition("/")
        group, *keys = path.split(".")
        if _KEYS.get(group) != len(keys):
            raise ValueError(f"a tensor {full[:80]!r} belongs to nothing")
        place = getattr(training, group)
        for unit in map(int, keys):
            place = place.setdefault(unit, {})
        place[name] = tensor
    return training


def _name(round_: int) -> str:
    return f"{round_:06}"


def _state_text(checkpoint: Checkpoint, folder: Path) -> str:
    state = {
        "format": _FORMAT,
        "version": __version__,
        "files": {file.name: _digest(file) for file in folder.iterdir()},
        "configuration": checkpoint.configuration,
        "progress": PROGRESS.dump_python(checkpoint.progress, mode="json"),
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
    if state.pop("sha256") != _digest_of(state):
        raise ValueError(f"{_STATE} is not what was written, by its SHA-256")
    written = state["files"]
    for name in sorted(written.keys() | {file.name for file in path.iterdir()} - {_STATE}):
        if name != _TENSORS and not _UNIT.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no file of a checkpoint")
        if written.get(name) != _digest(path / name):
            raise ValueError(f"{name} is not what was written, by its SHA-256")
    progress, configuration = PROGRESS.validate_python(state["progress"]), state["configuration"]
    if progress.round != int(path.name):
        raise ValueError(f"it is of round {progress.round}")
    if not isinstance(configuration, dict):
        raise TypeError("it has no configuration")
    tensors = {name: aligned(each) for name, each in load_file(path / _TENSORS).items()}
    training = replace(nested(tensors), units=KeptFiles(path))
    return Checkpoint(configuration, progress, training)


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


def _save(tensors: Tensors, file: Path) -> None:
    with file.open("wb") as stream:
        stream.writelines(pieces(tensors))
    _sync(file)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that it outlasts a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
