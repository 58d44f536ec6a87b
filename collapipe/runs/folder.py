"""The folder of a run: what it was configured by, what it measured, and what it learned."""

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from collapipe import __version__
from collapipe.config import Settings, load_saved
from collapipe.config.saved_yaml import read_limited
from collapipe.errors import ConfigError, StorageError, one_line
from collapipe.models.split import SplitModel, build_empty
from collapipe.tensors import Tensors
from collapipe.text.foreign import check_tokenizer
from collapipe.text.tokenizer import SpecialTokens, Tokenizer

_GROWING = ("metrics.jsonl", "metrics.csv", "requests.jsonl.gz")
_LINKS = ("latest", ".latest.partial")  # to checkpoints; the second one a killed run may leave
_LOADING = {
    "format": "safetensors",
    "weights": "model.safetensors; unit-N.safetensors of each unit where nothing was averaged",
    "tokenizer": "tokenizer.json",
    "configuration": "../config.yaml",
    "load": "collapipe.runs.folder.load_model(RUN_DIR) gives settings, model and tokenizer",
    "names": "embedding.* of the control unit, blocks.N.* of the segments, head.* of the server",
}


class RunFolder:
    """Files of one run. Raises ``ConfigError`` where the folder cannot be written or is in use;
    that it holds a run is no hindrance where that one is ``resumed``."""

    def __init__(self, path: Path, resumed: bool = False) -> None:
        self.path, self._resumed = path.resolve(), resumed
        if resumed:
            check_plain(self.path)
        try:
            (self.path / "model").mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            cause = error.strerror or error
            raise ConfigError(f"hydra.run.dir={path}: cannot be written ({cause})") from error
        self._check_unused()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process writes here; the system frees the lock whatever ends the process.

        Raises ``ConfigError`` where another one does, or has begun a run here in the meantime.
        """
        with ExitStack() as stack:
            try:
                lock = stack.enter_context((self.path / ".lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path}: a run is writing here; wait for its end, or end it"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"{self.path}: cannot be locked ({error.strerror}); choose a folder on "
                    "another file system"
                ) from error
            self._check_unused()
            yield

    def _check_unused(self) -> None:
        """What never trained may go."""
        used = any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints"))
        if used and not self._resumed:
            raise ConfigError(
                f"hydra.run.dir={self.path}: holds a run already; choose another folder, or go on "
                f"with it: collapipe resume {self.path}"
            )

    def sizes(self) -> dict[str, int]:
        """Bytes of the files that grow, all of them on the disk by now."""
        sizes = {}
        for name in _GROWING:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def rewind(self, sizes: Mapping[str, int]) -> None:
        """Files that grow are as they were at ``sizes``; the run has not ended."""
        (self.path / "summary.json").unlink(missing_ok=True)
        for name in _GROWING:
            if name in sizes:
                os.truncate(self.path / name, sizes[name])
            else:
                (self.path / name).unlink(missing_ok=True)

    def write_overrides(self, overrides: Sequence[str]) -> None:
        """``overrides.json``: what the configuration is composed from, to go on later."""
        _replace(self.path / "overrides.json", json.dumps([*overrides], indent=2).encode() + b"\n")

    def write_config(self, tree: Mapping[str, Any]) -> None:
        """``config.yaml``: every value of the run, resolved, and the version."""
        head = f"# CollaPipe {__version__}\n"
        text = head + OmegaConf.to_yaml(OmegaConf.create(dict(tree)))
        _replace(self.path / "config.yaml", text.encode())

    def append(self, name: str, content: bytes) -> None:
        """At the end of a file that grows."""
        path = self.path / name
        try:
            with path.open("ab") as file:
                file.write(content)
        except OSError as error:
            raise _unwritten(path, error) from error

    def append_row(self, name: str, columns: Sequence[str], row: Mapping[str, Any]) -> None:
        """A row of a CSV file, below its header."""
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if not (self.path / name).exists():
            writer.writeheader()
        writer.writerow(row)
        self.append(name, text.getvalue().encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        self.append("metrics.jsonl", json.dumps(line, allow_nan=False).encode() + b"\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``."""
        text = json.dumps({"version": __version__, **summary}, indent=2, allow_nan=False) + "\n"
        _replace(self.path / "summary.json", text.encode())

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        """The tokeniser, its marks, the labels, and how to load the model beside it."""
        _replace(self.path / "model" / "tokenizer.json", tokenizer.json_text.encode())
        known = {"marks": asdict(tokenizer.special_tokens), "labels": tokenizer.labels}
        text = json.dumps({"version": __version__, **_LOADING, **known}, indent=2) + "\n"
        _replace(self.path / "model" / "model.json", text.encode())

    def write_weights(self, weights: Tensors) -> None:
        """The model as it is now, in place of the one before."""
        self._write_model("model.safetensors", weights)

    def write_unit_weights(self, unit: int, weights: Tensors) -> None:
        """Likewise the model of ``unit``, in a run that averages none."""
        self._write_model(_unit_file(unit), weights)

    def _write_model(self, name: str, weights: Tensors) -> None:
        with _replacing(self.path / "model" / name) as partial:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)


def check_plain(run_dir: Path) -> None:
    """Raise ``ConfigError`` where a run's folder, which may be somebody else's, holds anything but
    files and folders: through a link, files elsewhere would be cut off, overwritten or removed, and
    a pipe would be waited for. ``checkpoints/latest`` alone is a link, which nobody writes through.
    """
    links = [run_dir / "checkpoints" / name for name in _LINKS]
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder) / name for name in (*folders, *files)):
            try:
                kind = path.lstat().st_mode
            except FileNotFoundError:  # a run is writing here, as the lock will tell
                continue
            if not (S_ISREG(kind) or S_ISDIR(kind) or (S_ISLNK(kind) and path in links)):
                raise ConfigError(
                    f"{path}: is {'a link' if S_ISLNK(kind) else 'no file'}, which a run writes "
                    "none of; put the file itself there, or remove it"
                )


def check_sizes(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` where a file that grows has lost what it held at ``sizes``, or no file
    can have held that."""
    for name in sizes.keys() & set(_GROWING):
        path = run_dir / name
        found = path.stat().st_size if path.exists() else 0
        if not 0 <= sizes[name] <= found:
            raise ConfigError(f"{path}: has {found} bytes, had {sizes[name]} at the checkpoint")


def read_overrides(run_dir: Path) -> list[str]:
    """What ``write_overrides`` wrote. Raises ``ConfigError`` for another folder."""
    file = run_dir / "overrides.json"
    _check_there(run_dir, file)
    try:
        overrides = json.loads(read_limited(file))
        if not isinstance(overrides, list) or not all(isinstance(o, str) for o in overrides):
            raise ValueError("not a list of texts")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not the overrides of a run ({one_line(error)})") from error
    return overrides


def load_model(
    run_dir: Path, trusted: Sequence[str] = (), unit: int | None = None
) -> tuple[Settings, SplitModel, Tokenizer]:
    """A run's settings, trained model and tokeniser; plug-ins of ``trusted`` packages, too.

    ``unit`` says whose model, in a run that averaged none. Raises ``ConfigError`` for another
    folder, and for a unit that has no model there.
    """
    config, model_dir = run_dir / "config.yaml", run_dir / "model"
    _check_there(run_dir, config, model_dir / "tokenizer.json", model_dir / "model.json")
    settings = load_saved(config, trusted)
    if not settings.framework.train:
        raise ConfigError(
            f"{run_dir}: has no model, for it was run with framework.train=false; name a run that "
            "trained"
        )
    weights = model_dir / _weights_file(run_dir, settings, unit)
    _check_there(run_dir, weights)
    tokenizer = _read_tokenizer(model_dir)
    try:
        tensors = load_file(weights)
        if len(tensors) < settings.model.num_blocks:  # before as many are built as are claimed
            raise RuntimeError(f"{len(tensors)} tensors for {settings.model.num_blocks} blocks")
        model = build_empty(lambda: SplitModel(settings.model, tokenizer.vocabulary), tensors)
    except (SafetensorError, RuntimeError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"{weights}: not the weights of this run's model ({cause})") from error
    assert isinstance(model, SplitModel)
    return settings, model.eval(), tokenizer


def _check_there(run_dir: Path, *files: Path) -> None:
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{run_dir}: not the folder of a run that trained, {file} is missing")


def _weights_file(run_dir: Path, settings: Settings, unit: int | None) -> str:
    """Name of the file with the model of ``unit``, or of all units together."""
    if settings.framework.aggregate:
        if unit is None:
            return "model.safetensors"
        raise ConfigError(
            f"--unit {unit}: the models of {run_dir} were averaged into one; leave --unit out"
        )
    units = settings.federation.num_units
    if unit is None:
        raise ConfigError(
            f"{run_dir}: the units' models were not averaged (framework.aggregate=false); "
            f"--unit N picks one of 0 … {units - 1}"
        )
    if not 0 <= unit < units:
        raise ConfigError(f"--unit {unit}: {run_dir} is a run of units 0 … {units - 1}")
    if not (run_dir / "model" / _unit_file(unit)).is_file():
        raise ConfigError(
            f"--unit {unit}: {run_dir} has no model of it, which finished no round; name another"
        )
    return _unit_file(unit)


def _unit_file(unit: int) -> str:
    return f"unit-{unit}.safetensors"


def _read_tokenizer(model_dir: Path) -> Tokenizer:
    words, known = model_dir / "tokenizer.json", model_dir / "model.json"
    try:
        rest = json.loads(known.read_text(encoding="utf-8"))
        marks, labels = SpecialTokens(**rest["marks"]), [str(label) for label in rest["labels"]]
        if not all(isinstance(mark, str) for mark in asdict(marks).values()):
            raise TypeError("a mark that is no text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = one_line(error)
        raise ConfigError(f"{known}: has no marks and labels of a tokeniser ({why})") from error
    try:
        text = words.read_text(encoding="utf-8")
        check_tokenizer(text)
        return Tokenizer(text, marks, labels)
    except (UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{words}: not a tokeniser ({one_line(error)})") from error


def initial_model(settings: Settings, tokenizer: Tokenizer) -> SplitModel:
    """The untrained model, a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = SplitModel(settings.model, tokenizer.vocabulary)
    return model.to(getattr(torch, settings.pipeline.dtype))


def _replace(path: Path, content: bytes) -> None:
    """Write all of a file or nothing."""
    with _replacing(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of ``path``. Raises ``StorageError``."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: Exception) -> StorageError:
    return StorageError(
        f"{path}: cannot be written ({one_line(error)}); make room or choose another folder"
    )
