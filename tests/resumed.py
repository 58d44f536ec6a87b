"""Interrupted and resumed runs, and comparisons of runs."""

import csv
import functools
import gzip
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from federated import grid_of, settings_of, train
from flwr.clientapp import ClientApp
from run_files import rounds_of, summary_of
from safetensors.torch import load_file
from torch import Tensor

SMALL = (
    "federation.num_units=2",
    "federation.rounds=3",
    "federation.local_steps=1",
    "federation.checkpoint_every=1",
    "federation.keep=3",
    "federation.eval_every=1",
    "model.num_blocks=2",
    "cluster.num_devices=2",
    "task.train_rows=16",
    "batch_size=4",
)
_TIMES = ("seconds", "wall_s", "tokens_per_s")
_MUTATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate")


class World:
    """Runs with the same options, each in its own folder."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.settings = settings_of(folder / "any", [*SMALL, *overrides])

    def run(
        self, run_dir: Path, resume: str | None = None, client: ClientApp | None = None
    ) -> Path:
        """Train a new run, or resume from the checkpoint ``resume``."""
        settings = replace(self.settings, run_dir=str(run_dir))
        train(grid_of(settings, client), settings, resume)
        return run_dir


def outcome(run_dir: Path) -> dict[str, Any]:
    """Return a run's results, except measured times and the sum of bytes down: resumed units
    receive their kept state again."""
    summary = _timeless(summary_of(run_dir))
    return {
        "metrics": [_timeless(line) for line in rounds_of(run_dir)],
        "rows": [_modelled(row) for row in csv.DictReader((run_dir / "metrics.csv").open())],
        "requests": gzip.decompress((run_dir / "requests.jsonl.gz").read_bytes()),
        "summary": {key: value for key, value in summary.items() if key != "bytes_down"},
        "checkpoints": sorted(path.name for path in (run_dir / "checkpoints").iterdir()),
        "latest": (run_dir / "checkpoints" / "latest").readlink(),
    }


def tensors(run_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of a run's models and checkpoints."""
    files = sorted((run_dir / "model").glob("*.safetensors"))
    files += sorted((run_dir / "checkpoints").glob("0*/*.safetensors"))
    return {
        f"{file.relative_to(run_dir)} {name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are missing on one side or differ in any bit."""
    unmatched = sorted(found.keys() ^ expected.keys())
    return unmatched + [
        name for name in found if name in expected and not _same(found, expected, name)
    ]


def _same(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> bool:
    ours, theirs = found[name].numpy(), expected[name].numpy()
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    line = {key: value for key, value in line.items() if key not in _TIMES}
    if (line.get("plan") or {}).get("certificate"):
        del line["plan"]["certificate"]["solve_time_s"]
    return line


def _modelled(row: dict[str, str]) -> dict[str, str]:
    kept = ("clock_s", "delay_s")
    return {key: cell for key, cell in row.items() if not key.endswith("_s") or key in kept}


class _Watch:
    """Copies ``folder`` before each change of its files, as a kill at that moment would leave
    it."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.copies: list[Path] = []
        self._folder, self._target, self._thread = folder, copies, threading.get_ident()
        self._busy = False

    def __call__(self, event: str, arguments: Sequence[Any]) -> None:
        if self._busy or threading.get_ident() != self._thread:
            return
        writes = event in _MUTATIONS or (event == "open" and _is_write(arguments))
        if writes and _place(event, arguments).startswith(f"{self._folder}{os.sep}"):
            self._busy = True  # ignore changes that copying makes
            copy = self._target / f"{len(self.copies):03}"
            shutil.copytree(self._folder, copy, symlinks=True)
            self.copies.append(copy)
            self._busy = False


_watches: list[_Watch] = []


@functools.cache
def _look_on() -> None:
    """Add one audit hook for all watches: a hook cannot be removed, and a run calls it 100,000
    times."""

    def hook(event: str, arguments: Sequence[Any]) -> None:
        for watch in _watches:
            watch(event, arguments)

    sys.addaudithook(hook)


def _place(event: str, arguments: Sequence[Any]) -> str:
    """Return the changed path; deletion of a folder tree names files relative to an open folder."""
    if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:
        return str(Path(f"/proc/self/fd/{arguments[1]}").readlink() / arguments[0])
    return str(arguments[0])


def _is_write(arguments: Sequence[Any]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


@contextmanager
def copied_before_each_write(folder: Path, copies: Path) -> Iterator[list[Path]]:
    """Yield copies of ``folder``, one before each change that this thread makes to its files."""
    _look_on()
    watch = _Watch(folder, copies)
    _watches.append(watch)
    try:
        yield watch.copies
    finally:
        _watches.remove(watch)
