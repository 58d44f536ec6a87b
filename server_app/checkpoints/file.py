"""Checkpoints on disk: they are written atomically, and verified before they are used.

States of random generators are not needed: all random numbers, and the order of a unit's rows, are
derived from the seed, a purpose and the number of the round or step.

::

    checkpoints/000010/state.json            everything but tensors; digests of all files
    checkpoints/000010/tensors.safetensors   the server's tensors
    checkpoints/000010/unit-3.safetensors    the state of unit 3 between rounds
    checkpoints/latest                       → 000010
    checkpoints/.000015.partial              being written, or left by a killed run

A unit's file is written when its state arrives, and read when the unit is restored, so that memory
never holds the states of all units.
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from collapipe import __version__
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.process.files import sync
from collapipe.runs.folder import RunFolder
from collapipe.tensors import Tensors, aligned
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import kept_file
from collapipe.wire.parts import pieces
from server_app.planning.scheduler import SchedulerState
from server_app.records.summary import History
from server_app.rounds.results import RunState, Store, TrainingState
from server_app.units import Kept

_log = logging.getLogger(__name__)
_FORMAT = 4
_STATE, _TENSORS, _LATEST, _PARTIAL = "state.json", "tensors.safetensors", "latest", ".partial"
_NAME = re.compile(r"[0-9]{6,}")
_UNIT = re.compile(r"unit-(0|[1-9][0-9]*)\.safetensors")
# errors of reading a damaged file
_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RecursionError,
    SafetensorError,
    CollaPipeError,
)
# Depth of the mappings above the tensors in each field of the server's ``TrainingState``.
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
    """A run's progress after ``round``."""

    round: int
    wall_s: float  # since the start, added up over all parts of a resumed run
    tokenizer: str  # the tokeniser's digest
    sizes: dict[str, int]  # bytes of the run's files that grow
    scheduler: SchedulerState
    history: History
    names: dict[str, int]  # the unit of each name, if units have names


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round; ``configuration`` is its resolved tree."""

    configuration: Mapping[str, Any]
    progress: Progress
    training: TrainingState

    @property
    def name(self) -> str:
        """The folder's name, such as ``000010``."""
        return _name(self.progress.round)


PROGRESS = TypeAdapter(Progress)  # converts to JSON and back without loss


class CheckpointFolder:
    """The checkpoints of the run in ``run_dir``, named by their rounds."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "checkpoints"

    def names(self) -> list[str]:
        """List the existing checkpoints, oldest first."""
        found = [path.name for path in self._path.glob("*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=int)

    def begin(self, name: str) -> None:
        """Create a partial folder for a checkpoint; ``write`` renames it to its final name."""
        self.clear()
        self._partial(name).mkdir(parents=True)

    def add(self, name: str, unit: int, kept: Kept) -> None:
        """Write a unit's state to the checkpoint that was begun."""
        if tensors := kept_file.flat(kept):
            _save(tensors, self._partial(name) / f"unit-{unit}.safetensors")

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Complete a checkpoint that was begun, and retain only the last ``keep``."""
        partial = self._partial(checkpoint.name)
        _save(flat(checkpoint.training), partial / _TENSORS)
        (partial / _STATE).write_text(_state_text(checkpoint, partial))
        sync(partial / _STATE)
        sync(partial)
        partial.rename(self._path / checkpoint.name)
        self._point_to(checkpoint.name)
        self._remove(self.names()[:-keep])

    def read(self, name: str) -> Checkpoint:
        """Read a checkpoint. Raises ``ConfigError`` if it is damaged or has another format."""
        path = self._path / name
        try:
            return _read(path)
        except ConfigError:
            raise
        except _READ_ERRORS as error:
            raise ConfigError(f"{path}: damaged, {_cause(error)}") from error

    @property
    def kept(self) -> "KeptFiles":
        """The units' states in the checkpoint that is the last one at the time of reading."""
        return KeptFiles(self._path / _LATEST)

    def rewind(self, name: str, keep: int) -> None:
        """Remove the checkpoints after ``name``, and retain only the last ``keep``."""
        self.clear()
        self._point_to(name)
        self._remove([other for other in self.names() if int(other) > int(name)])
        self._remove(self.names()[:-keep])

    def _point_to(self, name: str) -> None:
        link, latest = self._path / f".{_LATEST}{_PARTIAL}", self._path / _LATEST
        if latest.is_dir() and not latest.is_symlink():  # in a copy that replaced links, as of scp
            self._remove([_LATEST])
        link.symlink_to(name)
        link.replace(latest)
        sync(self._path)

    def _remove(self, names: Sequence[str]) -> None:
        """Rename each checkpoint before deleting it, so that no name refers to a partial one."""
        for name in names:
            shutil.rmtree((self._path / name).rename(self._partial(name)))

    def clear(self) -> None:
        """Remove partial checkpoints."""
        for path in self._path.glob(f".*{_PARTIAL}"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _partial(self, name: str) -> Path:
        return self._path / f".{name}{_PARTIAL}"


@dataclass(frozen=True, eq=False)
class KeptFiles(Mapping[int, Kept]):
    """The units' states in the checkpoint in ``folder``; each file is read on access.

    Access raises ``ConfigError`` if a file is damaged.
    """

    folder: Path

    def __getitem__(self, unit: int) -> Kept:
        file = self.folder / f"unit-{unit}.safetensors"
        if not file.exists():
            raise KeyError(unit)
        try:
            return kept_file.nested(load_file(file))
        except _READ_ERRORS as error:
            raise ConfigError(f"{file}: damaged, {_cause(error)}") from error

    def __iter__(self) -> Iterator[int]:
        found = (_UNIT.fullmatch(path.name) for path in self.folder.glob("unit-*"))
        return iter(sorted(int(match[1]) for match in found if match))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RunCheckpoints:
    """Writes a run's checkpoints: every ``federation.checkpoint_every`` rounds, and after the last
    round, so that a complete run can be extended.

    If a checkpoint cannot be written, for example because the disk is full, the run continues
    without it and logs a warning.
    """

    def __init__(self, settings: Settings, folder: RunFolder, tokenizer: Tokenizer) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._files = CheckpointFolder(folder.path)
        self._stored: set[int] | None = None  # units in the current checkpoint; None without one

    def begin(self, round_: int) -> Store | None:
        """Begin the round's checkpoint. Returns a function that stores a unit's state in it, or
        None if no checkpoint is due."""
        if not self._due(round_):
            return None
        self._stored = set()
        self._tried(round_, lambda: self._files.begin(_name(round_)))
        return lambda unit, kept: self._store(round_, unit, kept)

    def write(self, history: History, state: RunState, names: Mapping[str, int]) -> None:
        """Complete the round's checkpoint if one is due. The round's records and weights must
        already be in the run's folder.

        For a unit that is absent, or whose state was invalid, the state of the previous checkpoint
        is copied.
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
        """Run ``action``, unless the checkpoint was abandoned; abandon it if that fails."""
        if self._stored is None:
            return
        try:
            action()
        except (CollaPipeError, OSError, KeyError) as error:
            self._stored = None
            self._files.clear()  # frees disk space
            _log.warning("round %d: no checkpoint is written: %s", round_, one_line(error))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest by which a resumed run recognises its tokeniser."""
    return hashlib.sha256(tokenizer.pack().encode()).hexdigest()


def flat(training: TrainingState) -> Tensors:
    """Return the server's tensors by names such as ``heads.2/head.weight/exp_avg``."""

    def named(path: str, tree: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
        for key, value in tree.items():
            if isinstance(value, Tensor):
                yield f"{path}/{key}", value
            else:
                yield from named(f"{path}.{key}", value)

    return dict(pair for group in _KEYS for pair in named(group, getattr(training, group)))


def nested(tensors: Mapping[str, Any]) -> TrainingState:
    """Invert ``flat``. Raises ``ValueError`` for a name that ``flat`` does not make."""
    training = TrainingState()
    for full, tensor in tensors.items():
        path, _, name = full.partition("/")
        group, *keys = path.split(".")
        if _KEYS.get(group) != len(keys):
            raise ValueError(f"unknown tensor {full[:80]!r}")
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
    plain = json.loads(json.dumps(state))  # keys become texts, as after reading
    return json.dumps({"sha256": _digest_of(plain), **plain}, indent=1) + "\n"


def _read(path: Path) -> Checkpoint:
    text = (path / _STATE).read_text(encoding="utf-8")
    state = json.loads(text, parse_constant=_no_figure)
    if state["format"] != _FORMAT:
        raise ConfigError(
            f"{path}: has format {state['format']} of CollaPipe {state['version']}; CollaPipe "
            f"{__version__} reads format {_FORMAT}; resume with CollaPipe {state['version']}"
        )
    if state.pop("sha256") != _digest_of(state):
        raise ValueError(f"{_STATE} was changed after it was written (SHA-256 differs)")
    written = state["files"]
    for name in sorted(written.keys() | {file.name for file in path.iterdir()} - {_STATE}):
        if name != _TENSORS and not _UNIT.fullmatch(name):
            raise ValueError(f"{name[:80]!r} does not belong to a checkpoint")
        if written.get(name) != _digest(path / name):
            raise ValueError(f"{name} was changed after it was written (SHA-256 differs)")
    progress, configuration = PROGRESS.validate_python(state["progress"]), state["configuration"]
    if progress.round != int(path.name):
        raise ValueError(f"it contains round {progress.round}")
    if not isinstance(configuration, dict):
        raise TypeError("it has no configuration")
    tensors = {name: aligned(each) for name, each in load_file(path / _TENSORS).items()}
    training = replace(nested(tensors), units=KeptFiles(path))
    return Checkpoint(configuration, progress, training)


def _no_figure(constant: str) -> float:
    raise ValueError(f"{constant} is not a valid number")


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
    sync(file)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
