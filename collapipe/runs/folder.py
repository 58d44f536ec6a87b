"""The folder of a run: its configuration, its measurements and its trained model."""

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from safetensors import SafetensorError

from collapipe import __version__
from collapipe.config.settings import Settings
from collapipe.config.trust import read_limited
from collapipe.errors import ConfigError, StorageError, cause_of, one_line
from collapipe.process import files
from collapipe.runs import weights_record
from collapipe.sections import Count, CountFrom0
from collapipe.validation import from_json

if TYPE_CHECKING:  # torch takes seconds to import, and submitting a run does not need it
    from collapipe.tensors import Tensors
    from collapipe.text.tokenizer import Tokenizer

LOCK = ".lock"  # locked as long as a run is in progress
REQUESTS = "requests.jsonl.gz"  # the planner's input of each round
TRACES = "traces.jsonl.gz"  # timed actions of real devices
_GROWING = ("metrics.jsonl", "metrics.csv", REQUESTS, TRACES)
_ACCOUNT, _ROUNDS = "account.json", TypeAdapter(dict[CountFrom0, Count])
BASE = "model/base"  # frozen weights: a folder, and with .json the digests of each part
_LINKS = ("latest", ".latest.partial")  # to checkpoints; a killed run may leave the second one
_LOADING = {
    "format": "safetensors",
    "weights": "model.safetensors; unit-N.safetensors of each unit where nothing was averaged",
    "base": "base.json: SHA-256 of frozen weights; they are in the pretrained model, or in base/",
    "tokenizer": "tokenizer.json",
    "configuration": "../config.yaml",
    "load": "collapipe.load(RUN_DIR) gives settings, model and tokenizer",
    "names": "embedding.* of the control unit, blocks.N.* of the segments, head.* of the server",
}


class RunFolder:
    """Files of one run.

    Raises ``ConfigError`` if the folder cannot be written, or if it already holds a run that is not
    ``resumed``.
    """

    def __init__(self, path: Path, resumed: bool = False) -> None:
        self.path, self._resumed = path.resolve(), resumed
        self._record = weights_record.Record()  # of all that determines the model
        if resumed:
            check_plain(self.path)
        try:
            (self.path / "model").mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink()
            str(self.path).encode()  # safetensors and JSON take no other paths
        except (OSError, UnicodeEncodeError) as error:
            cause = f"{path}: cannot be written ({cause_of(error)})"
            way_out = "make it writable, or resume a copy"
            raise ConfigError(
                f"{cause}; {way_out}" if resumed else f"hydra.run.dir={cause}; choose another"
            ) from error
        if not self._resumed:
            if holds_run(self.path) and is_writing(self.path):
                raise ConfigError(
                    f"hydra.run.dir={self.path}: a run is writing here; choose another folder"
                )
            _check_unused(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, and remove what a killed run left.

        Raises ``ConfigError`` if another process has the lock or has begun a run meanwhile.
        """
        with locked(self.path):
            if not self._resumed:
                _check_unused(self.path)
            for folder in (self.path, self.path / "model"):
                for left in folder.glob(files.PARTIAL):  # of a killed run
                    left.unlink()
            yield

    def sizes(self) -> dict[str, int]:
        """Sync the files that grow to disk, and return their sizes in bytes."""
        there = [self.path / name for name in _GROWING if (self.path / name).exists()]
        for file in there:
            files.sync(file)
        return {file.name: file.stat().st_size for file in there}

    def rewind(self, sizes: Mapping[str, int]) -> None:
        """Truncate the files that grow to ``sizes``, and remove the summary of the run's end."""
        (self.path / "summary.json").unlink(missing_ok=True)
        for name in _GROWING:
            if name in sizes:
                os.truncate(self.path / name, sizes[name])
            else:
                (self.path / name).unlink(missing_ok=True)

    def write_config(self, settings: Settings) -> None:
        """Write the configuration to three files.

        ``config.yaml`` has the version and every resolved value. ``overrides.json`` has the
        overrides, from which it can be composed again. ``choices.json`` has each group's chosen
        file in ``conf/``.
        """
        from omegaconf import OmegaConf  # takes half a second

        tree = OmegaConf.create(dict(settings.tree))
        self._write_json("choices.json", dict(settings.choices))  # first: readers need both
        self._replace("config.yaml", f"# CollaPipe {__version__}\n{OmegaConf.to_yaml(tree)}")
        self._write_json("overrides.json", settings.overrides)
        self._record |= weights_record.of_options(settings.tree)

    def write_account(self, rounds: Mapping[int, int]) -> None:
        """Write ``account.json``: the number of rounds of each unit that ε counts.

        Numbers never decrease: a run that returns to a checkpoint has already revealed the results
        of later rounds.
        """
        self._replace(_ACCOUNT, json.dumps(rounds) + "\n")

    def account(self) -> dict[int, int]:
        """Read the numbers of ``write_account``; empty if the file is missing.

        Raises ``ConfigError`` if the file is invalid.
        """
        file = self.path / _ACCOUNT
        if not file.exists():
            return {}
        return from_json(_ROUNDS, file, file.read_bytes(), "the account of a run", "; restore it")

    def append(self, name: str, content: bytes) -> None:
        """Append to a file that grows. Raises ``StorageError`` if that fails."""
        with self.storage_errors(name), (self.path / name).open("ab") as file:
            file.write(content)

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a CSV file; a new file gets a header first."""
        text = io.StringIO()
        writer = csv.DictWriter(text, row, lineterminator="\n")
        if not (self.path / name).exists():
            writer.writeheader()
        writer.writerow(row)
        self.append(name, text.getvalue().encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        self.append("metrics.jsonl", json.dumps(line, allow_nan=False).encode() + b"\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write_json("summary.json", {"version": __version__, **summary})

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yield a file to write, which then replaces ``name``.

        Raises ``StorageError`` if writing fails; then ``name`` is unchanged.
        """
        with self.storage_errors(name), files.replacing(self.path / name) as partial:
            yield partial

    @contextmanager
    def storage_errors(self, name: str) -> Iterator[None]:
        """Convert errors of writing ``name`` into ``StorageError``."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            moved = "the run's folder was moved or removed; leave it there until the run ends"
            way_out = "make room or choose another folder" if self.path.is_dir() else moved
            raise StorageError(
                f"{self.path / name}: cannot be written ({one_line(error)}); {way_out}"
            ) from error

    def _replace(self, name: str, text: str) -> None:
        """Write a file atomically."""
        with self.replacing(name) as partial:
            partial.write_text(text, encoding="utf-8")

    def write_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Write the tokeniser, its special tokens, the labels, the chat template, and how to load
        the model."""
        self._replace("model/tokenizer.json", tokenizer.json_text)
        known = {"version": __version__, **_LOADING, **tokenizer.described()}
        self._write_json("model/model.json", known)
        self._record |= weights_record.of_tokenizer(tokenizer)

    @property
    def frozen(self) -> dict[str, str]:
        """The digests of each part's frozen weights, as ``write_base`` wrote them."""
        return self._record.get(f"{BASE}.json", {})

    def write_base(self, digests: Mapping[str, str]) -> None:
        """Write the digests of each part's frozen weights."""
        self._write_json(f"{BASE}.json", dict(digests))
        self._record[f"{BASE}.json"] = dict(digests)

    def write_weights(self, weights: "Tensors", unit: int | None = None) -> None:
        """Write the model's trainable weights, or a unit's in a run that does not average."""
        name = f"model/{weights_file(unit)}"
        with self.replacing(name) as partial:
            record = self._record | weights_record.of_weights(name, weights)
            weights_record.write(partial, weights, record)

    def _write_json(self, name: str, tree: object) -> None:
        self._replace(name, json.dumps(tree, indent=2, allow_nan=False) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; the system frees the lock when the process ends.

    Raises ``ConfigError`` if another process has the lock.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{folder}: a run is writing here; wait for its end, or end it"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{folder}: cannot be locked ({error.strerror}); choose a folder on another file "
                "system"
            ) from error
        yield


def is_writing(run_dir: Path) -> bool:
    """Whether a process has the folder's lock; the system frees it when the process ends."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run has begun here
        return False
    return False


def weights_file(unit: int | None) -> str:
    """Return the name of the weights' file in ``model/``, of ``unit`` or (None) of all units."""
    return "model.safetensors" if unit is None else f"unit-{unit}.safetensors"


def check_plain(run_dir: Path) -> None:
    """Raise ``ConfigError`` if a run's folder has anything except files and folders.

    The folder may be untrusted. Through a link, files elsewhere would be overwritten or removed,
    and reading a pipe never ends. Only ``checkpoints/latest`` may be a link, because nothing is
    written through it.
    """
    links = [run_dir / "checkpoints" / name for name in _LINKS]
    for folder, folders, found in os.walk(run_dir):
        for path in (Path(folder) / name for name in (*folders, *found)):
            try:
                kind = path.lstat().st_mode
            except FileNotFoundError:  # a run is writing here; the lock reports it
                continue
            if not (S_ISREG(kind) or S_ISDIR(kind) or (S_ISLNK(kind) and path in links)):
                raise ConfigError(
                    f"{path}: is a {'link' if S_ISLNK(kind) else 'special file'}, and a run writes "
                    "none; put the file itself there, or remove it"
                )


def holds_run(folder: Path) -> bool:
    """Whether the folder holds a run; a start that never trained does not count."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def _check_unused(run_dir: Path) -> None:
    """Raise ``ConfigError`` if the folder already holds a run."""
    if holds_run(run_dir):
        raise ConfigError(
            f"hydra.run.dir={run_dir}: holds a run already; choose another folder, or continue the "
            f"run: collapipe resume {quote(str(run_dir))}"
        )


def check_sizes(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` if a growing file is smaller than in ``sizes``, or a size negative."""
    for name in sizes.keys() & set(_GROWING):
        path = run_dir / name
        found = path.stat().st_size if path.exists() else 0
        if not 0 <= sizes[name] <= found:
            raise ConfigError(f"{path}: has {found} bytes, had {sizes[name]} at the checkpoint")


def check_there(run_dir: Path, *files: Path) -> None:
    """Raise ``ConfigError`` if the folder or one of its ``files`` is missing."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder (seen from {Path.cwd()}); correct RUN_DIR")
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{run_dir}: not the folder of a run that trained, {file} is missing; restore the "
                "file, or name another folder"
            )


def read_overrides(run_dir: Path) -> list[str]:
    """Return the overrides that ``write_config`` wrote.

    Raises ``ConfigError`` if they are missing or invalid.
    """
    file = run_dir / "overrides.json"
    check_there(run_dir, file)
    return from_json(TypeAdapter(list[str]), file, read_limited(file), "the overrides of a run")
