"""The folder of a run: what it was configured by, what it measured, and what it learned."""

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from stat import S_IMODE, S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from collapipe import __version__
from collapipe.config.saved import read_limited
from collapipe.config.settings import Settings
from collapipe.errors import ConfigError, StorageError, one_line
from collapipe.runs.lock import LOCK
from collapipe.sections import Count, CountFrom0
from collapipe.validation import rule

if TYPE_CHECKING:  # torch takes seconds, which a command that only submits a run can do without
    from collapipe.tensors import Tensors
    from collapipe.text.tokenizer import Tokenizer

REQUESTS = "requests.jsonl.gz"  # what each round was planned from
TRACES = "traces.jsonl.gz"  # what devices that are real did when
_GROWING = ("metrics.jsonl", "metrics.csv", REQUESTS, TRACES)
_ACCOUNT, _ROUNDS = "account.json", TypeAdapter(dict[CountFrom0, Count])
_LINKS = ("latest", ".latest.partial")  # to checkpoints; the second one a killed run may leave
_LOADING = {
    "format": "safetensors",
    "weights": "model.safetensors; unit-N.safetensors of each unit where nothing was averaged",
    "tokenizer": "tokenizer.json",
    "configuration": "../config.yaml",
    "load": "collapipe.load(RUN_DIR) gives settings, model and tokenizer",
    "names": "embedding.* of the control unit, blocks.N.* of the segments, head.* of the server",
}


class RunFolder:
    """Files of one run. Raises ``ConfigError`` where the folder cannot be written or is in use,
    and where it holds a run already, unless that one is ``resumed``."""

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
        """Let only one process write here; the system frees the lock whatever ends the process.

        Raises ``ConfigError`` where another process writes, or has begun a run in the meantime.
        """
        with ExitStack() as stack:
            try:
                lock = stack.enter_context((self.path / LOCK).open("ab"))
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
        """Refuse a folder that already holds a run; what a start left that never trained is no
        run."""
        used = any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints"))
        if used and not self._resumed:
            raise ConfigError(
                f"hydra.run.dir={self.path}: holds a run already; choose another folder, or go on "
                f"with it: collapipe resume {quote(str(self.path))}"
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
        """Cut the files that grow back to ``sizes``, and remove the summary of the run's end."""
        (self.path / "summary.json").unlink(missing_ok=True)
        for name in _GROWING:
            if name in sizes:
                os.truncate(self.path / name, sizes[name])
            else:
                (self.path / name).unlink(missing_ok=True)

    def write_config(self, settings: Settings) -> None:
        """``config.yaml`` with the version and every value, resolved; ``overrides.json``, which it
        can be composed from again; ``choices.json``, the file of ``conf/`` of each group."""
        tree = OmegaConf.create(dict(settings.tree))
        self._replace("config.yaml", f"# CollaPipe {__version__}\n{OmegaConf.to_yaml(tree)}")
        self._write_json("overrides.json", settings.overrides)
        self._write_json("choices.json", dict(settings.choices))

    def write_account(self, rounds: Mapping[int, int]) -> None:
        """``account.json``: the rounds that ε counts, of each unit. They never become fewer: a run
        that goes back to a checkpoint has told the rounds after that, too."""
        self._replace(_ACCOUNT, json.dumps(rounds) + "\n")

    def account(self) -> dict[int, int]:
        """What ``write_account`` wrote; nothing where it never did. Raises ``ConfigError``."""
        file = self.path / _ACCOUNT
        if not file.exists():
            return {}
        try:
            return _ROUNDS.validate_json(file.read_bytes())
        except ValidationError as error:
            fault = rule(error.errors()[0])
            raise ConfigError(f"{file}: not the account of a run ({fault}); restore it") from error

    def append(self, name: str, content: bytes) -> None:
        """Add to the end of a file that grows."""
        with self.storage_errors(name), (self.path / name).open("ab") as file:
            file.write(content)

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row to a CSV file, and before the first one the header."""
        text = io.StringIO()
        writer = csv.DictWriter(text, row, lineterminator="\n")
        if not (self.path / name).exists():
            writer.writeheader()
        writer.writerow(row)
        self.append(name, text.getvalue().encode())

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``."""
        self.append("metrics.jsonl", json.dumps(line, allow_nan=False).encode() + b"\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``."""
        self._write_json("summary.json", {"version": __version__, **summary})

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yield a file to write, which then replaces ``name``. Raises ``StorageError``."""
        path = self.path / name
        partial = path.with_name(f"{path.name}.partial")
        with self.storage_errors(name):
            try:
                yield partial
                partial.replace(path)
            except (OSError, SafetensorError):
                partial.unlink(missing_ok=True)
                raise

    @contextmanager
    def storage_errors(self, name: str) -> Iterator[None]:
        """Raise ``StorageError`` where ``name`` cannot be written, by us or by a library."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{self.path / name}: cannot be written ({one_line(error)}); make room or choose "
                "another folder"
            ) from error

    def _replace(self, name: str, text: str) -> None:
        """Write all of a file or nothing."""
        with self.replacing(name) as partial, partial.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def write_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """The tokenizer, its special tokens, the labels, and how to load the model."""
        self._replace("model/tokenizer.json", tokenizer.json_text)
        known = {"marks": asdict(tokenizer.special_tokens), "labels": tokenizer.labels}
        self._write_json("model/model.json", {"version": __version__, **_LOADING, **known})

    def write_weights(self, weights: "Tensors", unit: int | None = None) -> None:
        """The model as it is now, or that of ``unit`` in a run that averages none."""
        from safetensors.torch import save_file

        with self.replacing(f"model/{weights_file(unit)}") as partial:
            partial.touch()
            mode = S_IMODE(partial.stat().st_mode)  # of any new file here; save_file has its own
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
            partial.chmod(mode)

    def _write_json(self, name: str, tree: object) -> None:
        self._replace(name, json.dumps(tree, indent=2, allow_nan=False) + "\n")


def weights_file(unit: int | None) -> str:
    """Name of the file in ``model/`` with the weights of ``unit``, or of all units together."""
    return "model.safetensors" if unit is None else f"unit-{unit}.safetensors"


def check_plain(run_dir: Path) -> None:
    """Raise ``ConfigError`` where a run's folder, which may be somebody else's, holds anything but
    files and folders: through a link, files elsewhere would be overwritten or removed, and reading
    a pipe never ends. ``checkpoints/latest`` alone is a link; nothing is written through it.
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
                    f"{path}: is a {'link' if S_ISLNK(kind) else 'special file'}, and a run writes "
                    "none; put the file itself there, or remove it"
                )


def check_sizes(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` where a file that grows is smaller than at ``sizes``, or a size is
    negative."""
    for name in sizes.keys() & set(_GROWING):
        path = run_dir / name
        found = path.stat().st_size if path.exists() else 0
        if not 0 <= sizes[name] <= found:
            raise ConfigError(f"{path}: has {found} bytes, had {sizes[name]} at the checkpoint")


def check_there(run_dir: Path, *files: Path) -> None:
    """Raise ``ConfigError`` where the folder or one of its ``files`` is missing."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder (seen from {Path.cwd()})")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{run_dir}: not the folder of a run that trained, {file} is missing")


def read_overrides(run_dir: Path) -> list[str]:
    """The overrides that ``write_config`` wrote. Raises ``ConfigError`` for another folder."""
    file = run_dir / "overrides.json"
    check_there(run_dir, file)
    try:
        return TypeAdapter(list[str]).validate_json(read_limited(file))
    except ValidationError as error:
        fault = rule(error.errors()[0])
        raise ConfigError(f"{file}: not the overrides of a run ({fault})") from error
