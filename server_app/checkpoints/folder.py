"""The folder of a run's checkpoints, which are written atomically.

::

    checkpoints/000010/state.json            everything but tensors; digests of all files
    checkpoints/000010/tensors.safetensors   the server's tensors
    checkpoints/000010/unit-3.safetensors    the state of unit 3 between rounds
    checkpoints/latest                       → 000010
    checkpoints/.000015.partial              being written, or left by a killed run
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from collapipe.process.files import sync
from collapipe.runs.reading import checkpoints
from server_app.checkpoints.file import Checkpoint, KeptFiles, read, write, write_kept
from server_app.units import Kept

_LATEST, _PARTIAL = "latest", ".partial"


class CheckpointFolder:
    """The checkpoints of the run in ``run_dir``, named by their rounds."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "checkpoints"

    def names(self) -> list[str]:
        """List the existing checkpoints, oldest first."""
        return [path.name for path in checkpoints(self._path.parent)]

    def begin(self, name: str) -> None:
        """Create a partial folder for a checkpoint; ``write`` renames it to its final name."""
        self.clear()
        self._partial(name).mkdir(parents=True)

    def add(self, name: str, unit: int, kept: Kept) -> None:
        """Write a unit's state to the checkpoint that was begun."""
        write_kept(kept, unit, self._partial(name))

    def write(self, checkpoint: Checkpoint, keep: int) -> None:
        """Complete a checkpoint that was begun, and retain only the last ``keep``."""
        partial = self._partial(checkpoint.name)
        write(checkpoint, partial)
        partial.rename(self._path / checkpoint.name)
        self._point_to(checkpoint.name)
        self._remove(self.names()[:-keep])

    def read(self, name: str) -> Checkpoint:
        """Read a checkpoint. Raises ``ConfigError`` if it is damaged or has another format."""
        return read(self._path / name)

    @property
    def kept(self) -> KeptFiles:
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
