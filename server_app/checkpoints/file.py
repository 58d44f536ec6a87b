"""Checkpoints on disk: whole or not there, and checked before anything is made of them.

There are no generators to keep: whatever is random is drawn from the seed, a purpose and the number
of the round or step, and so is the order of a unit's rows.

::

    checkpoints/000010/state.json            everything but tensors; digests of both files
    checkpoints/000010/tensors.safetensors
    checkpoints/latest                       → 000010
    checkpoints/.000015.partial              being written, or what a killed run left of it
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from collapipe import __version__
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.runs.folder import RunFolder
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from server_app.records.summary import History
from server_app.rounds.results import RoundResult, TrainingState
from server_app.rounds.scheduler import SchedulerState
from server_app.units import Kept

_log = logging.getLogger(__name__)
_FORMAT = 1
_STATE, _TENSORS, _LATEST, _PARTIAL = "state.json", "tensors.safetensors", "latest", ".partial"
_NAME = re.compile(r"[0-9]{6,}")
# what reading a damaged one may come to
_ODD = (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError, CollaPipeError)
# How many keys lead to the tensors of each part of ``TrainingState``.
_KEYS = {
    "weights": 0,
    "server_optimizer": 0,
    "own_models": 1,
    "heads": 1,
    "units": 2,
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
        return f"{self.progress.round:06}"


PROGRESS = TypeAdapter(Progress)  # as JSON; numbers stay what they are


class CheckpointFolder:
    """The checkpoints of the run in ``run_dir``, named by their rounds."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "checkpoints"

    def names(self) -> list[str]:
        """List the checkpoints that are there, oldest first."""
        found = [path.name for path in self._path.glob("*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=int)

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Add a checkpoint, then leave the last ``keep``."""
        self._clear()
        partial = self._partial(checkpoint.name)
        try:
            partial.mkdir(parents=True)
            save_file(_apart(flat(checkpoint.training)), partial / _TENSORS)
            _sync(partial / _TENSORS)
            (partial / _STATE).write_text(_state_text(checkpoint, partial / _TENSORS))
            _sync(partial / _STATE)
            _sync(partial)
            partial.rename(self._path / checkpoint.name)
        except (OSError, SafetensorError):
            self._clear()  # the room is needed
            raise
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

    def kept(self, units: Iterable[int]) -> dict[int, Kept]:
        """What these ``units`` kept by the last checkpoint, if there is one."""
        names, ours = self.names(), tuple(f"units.{unit}." for unit in units)
        if not names or not ours:
            return {}
        with safe_open(self._path / names[-1] / _TENSORS, "pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys() if key.startswith(ours)}  # noqa: SIM118
        return nested(found).units

    def rewind(self, name: str, keep: int) -> None:
        """Remove the checkpoints after ``name``, and leave the last ``keep``."""
        self._clear()
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

    def _clear(self) -> None:
        """Remove what a killed run left half-done."""
        for path in self._path.glob(f".*{_PARTIAL}"):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)

    def _partial(self, name: str) -> Path:
        return self._path / f".{name}{_PARTIAL}"


def write_checkpoint(
    settings: Settings,
    folder: RunFolder,
    tokenizer: Tokenizer,
    history: History,
    result: RoundResult,
    names: Mapping[str, int],
) -> None:
    """Write a checkpoint every ``federation.checkpoint_every`` rounds, and after the last one, so
    that a run that is complete can be given more.

    The round's lines and weights must be in the folder. A unit that is away, or does not tell what
    it keeps, has in it what it kept by the checkpoint before. Where units send more than a file can
    hold, or the disk is full, the run goes on without.
    """
    federation, round_ = settings.federation, result.report.round
    every = federation.checkpoint_every
    if not every or (round_ % every and round_ != federation.rounds):
        return
    try:
        progress = Progress(
            round_,
            time.perf_counter() - history.start,
            tokenizer_digest(tokenizer),
            folder.sizes(),
            result.scheduler,
            replace(history, start=0.0),
            dict(names),
        )
        training, checkpoints = result.training_state(), CheckpointFolder(folder.path)
        absent = {*range(federation.num_units)} - training.units.keys()
        training = replace(training, units=checkpoints.kept(absent) | training.units)
        checkpoints.write(Checkpoint(settings.tree, progress, training), federation.keep)
    except (CollaPipeError, OSError, SafetensorError) as error:
        _log.warning("round %d: no checkpoint is written: %s", round_, one_line(error))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Tells whether a tokeniser is still the one that the run began with."""
    return hashlib.sha256(tokenizer.pack().encode()).hexdigest()


def flat(training: TrainingState) -> Tensors:
    """All tensors under ``GROUP/NAME``, such as ``units.2.optimizer/embedding.weight/exp_avg``."""

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
        for key in [*map(int, keys[:1]), *keys[1:]]:  # a unit's number is first
            place = place.setdefault(key, {})
        place[name] = tensor
    return training


def _state_text(checkpoint: Checkpoint, tensors: Path) -> str:
    state = {
        "format": _FORMAT,
        "version": __version__,
        "tensors_sha256": _digest(tensors),
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
    written = {_STATE: state.pop("sha256"), _TENSORS: state["tensors_sha256"]}
    found = {_STATE: _digest_of(state), _TENSORS: _digest(path / _TENSORS)}
    for file in (each for each in found if found[each] != written[each]):
        raise ValueError(f"{file} is not what was written, by its SHA-256")
    progress, configuration = PROGRESS.validate_python(state["progress"]), state["configuration"]
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
    seen, apart = set[int](), {}
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
    """Flush a file or folder to the disk, so that it outlasts a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
