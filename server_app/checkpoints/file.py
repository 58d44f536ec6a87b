"""A checkpoint's files and what they contain; they are verified before they are used.

States of random generators are not needed: all random numbers, and the order of a unit's rows, are
derived from the seed, a purpose and the number of the round or step.

A unit's file is written when its state arrives, and read when the unit is restored. Memory never
holds the states of all units. ``folder`` lists the files.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from collapipe import __version__
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.process.files import sync
from collapipe.tensors import Tensors, aligned
from collapipe.text.tokenizer import Tokenizer
from collapipe.validation import fault_of
from collapipe.wire import kept_file
from collapipe.wire.parts import pieces
from server_app.planning.scheduler import SchedulerState
from server_app.records.summary import History
from server_app.rounds.results import TrainingState
from server_app.units import Kept

_FORMAT = 4
_STATE, _TENSORS = "state.json", "tensors.safetensors"
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
    frozen: dict[str, str] | None = None  # digests of frozen weights; None in older checkpoints


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run after a round; ``configuration`` is its resolved tree."""

    configuration: Mapping[str, Any]
    progress: Progress
    training: TrainingState

    @property
    def name(self) -> str:
        """The folder's name, such as ``000010``."""
        return name_of(self.progress.round)


PROGRESS = TypeAdapter(Progress)  # converts to JSON and back without loss


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
        with _damage_named(file):
            return kept_file.nested(load_file(file))

    def __iter__(self) -> Iterator[int]:
        found = (_UNIT.fullmatch(path.name) for path in self.folder.glob("unit-*"))
        return iter(sorted(int(match[1]) for match in found if match))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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


def name_of(round_: int) -> str:
    return f"{round_:06}"


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint into ``folder``, which already has the units' states."""
    _save(flat(checkpoint.training), folder / _TENSORS)
    (folder / _STATE).write_text(_state_text(checkpoint, folder))
    sync(folder / _STATE)
    sync(folder)


def write_kept(kept: Kept, unit: int, folder: Path) -> None:
    """Write a unit's state into the ``folder`` of a checkpoint; an empty state has no file."""
    if tensors := kept_file.flat(kept):
        _save(tensors, folder / f"unit-{unit}.safetensors")


def _save(tensors: Tensors, file: Path) -> None:
    with file.open("wb") as stream:
        stream.writelines(pieces(tensors))
    sync(file)


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


def read(path: Path) -> Checkpoint:
    """Read the checkpoint in the folder ``path``. Raises ``ConfigError`` if it is damaged or has
    another format."""
    with _damage_named(path):
        state = _read_state(path)
        configuration = state["configuration"]
        progress = PROGRESS.validate_python(state["progress"])
        if progress.round != int(path.name):
            raise ValueError(f"it contains round {progress.round}")
        if not isinstance(configuration, dict):
            raise TypeError("it has no configuration")
        tensors = {name: aligned(each) for name, each in load_file(path / _TENSORS).items()}
        training = replace(nested(tensors), units=KeptFiles(path))
        return Checkpoint(configuration, progress, training)


def _read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``state.json``, and compare all files with their digests."""
    text = (path / _STATE).read_text(encoding="utf-8")
    state: dict[str, Any] = json.loads(text, parse_constant=_no_figure)
    if state["format"] != _FORMAT:
        raise ConfigError(
            f"{path}: has format {state['format']} of CollaPipe {state['version']}; CollaPipe "
            f"{__version__} reads format {_FORMAT}; resume with CollaPipe {state['version']}"
        )
    if state.pop("sha256") != _digest_of(state):
        raise ValueError(f"{_STATE} was changed after it was written (SHA-256 differs)")
    written = dict(state["files"])
    for name in sorted(written.keys() | {file.name for file in path.iterdir()} - {_STATE}):
        if name != _TENSORS and not _UNIT.fullmatch(name):
            raise ValueError(f"{name[:80]!r} does not belong to a checkpoint")
        if written.get(name) != _digest(path / name):
            raise ValueError(f"{name} was changed after it was written (SHA-256 differs)")
    return state


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn errors of reading into a ``ConfigError`` that names ``path``."""
    try:
        yield
    except ConfigError:
        raise
    except _READ_ERRORS as error:
        raise ConfigError(f"{path}: damaged, {_cause(error)}") from error


def _no_figure(constant: str) -> float:
    raise ValueError(f"{constant} is not a valid number")


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror})"
    if isinstance(error, ValidationError):
        return fault_of(error)
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
