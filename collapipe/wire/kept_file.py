"""Keep a unit's state between rounds in a file, if one machine runs all units of a run.

So memory holds only the state of units that are training. The files are removed with the run, and
a resumed run continues from its checkpoints::

    FOLDER/NODE.safetensors    open to the owner of the process alone
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collapipe.errors import StorageError
from collapipe.process import cancellation, files
from collapipe.process.folders import TemporaryFolder
from collapipe.tensors import Tensors
from collapipe.wire.parts import mapped_part, pieces

# The folder's path is in a node's configuration. Flower's simulation engine accepts no additional
# configuration, so there it is in the environment of its processes.
IN_NODE, IN_ENVIRONMENT = "kept", "COLLAPIPE_KEPT"


def new_folder() -> TemporaryFolder:
    """Make a folder for a run's files, with mode 700. Raises ``StorageError`` if that fails."""
    try:
        return TemporaryFolder("kept")
    except OSError as error:
        raise StorageError(
            f"no folder for what units keep between rounds ({error.strerror}); set TMPDIR to one "
            "that can be written"
        ) from error


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A unit's file in a run. Methods raise ``StorageError`` if reading or writing fails."""

    path: Path

    @classmethod
    def of(cls, node: int, node_config: Mapping[str, Any]) -> "KeptFile | None":
        """Return the file of a node; None if it has none, such as a deployed unit's node."""
        folder = node_config.get(IN_NODE, os.environ.get(IN_ENVIRONMENT))
        return None if folder is None else cls(Path(str(folder)) / f"{node}.safetensors")

    def read(self) -> dict[str, Tensors]:
        """Return groups of tensors by name; they take no memory before they are used."""
        try:
            return nested(mapped_part(self.path))
        except OSError as error:
            raise StorageError(
                f"{self.path}: what a unit keeps between rounds cannot be read ({error.strerror}); "
                "set TMPDIR to a folder that is not cleared, and resume the run"
            ) from error

    def write(self, groups: Mapping[str, Tensors]) -> None:
        """Replace the file's groups atomically.

        Raises ``CancelledRoundError`` if the round was cancelled meanwhile.
        """
        try:
            with files.replacing(self.path, files.PRIVATE, durable=False) as partial:
                with partial.open("wb") as stream:
                    stream.writelines(pieces(flat(groups)))
                cancellation.check()
        except OSError as error:
            raise StorageError(
                f"{self.path.parent}: what units keep between rounds cannot be written "
                f"({error.strerror}); make room there, or set TMPDIR to a folder with room"
            ) from error


def flat(groups: Mapping[str, Tensors]) -> Tensors:
    """Return all tensors under the names ``GROUP/NAME``."""
    return {f"{key}/{name}": each for key, group in groups.items() for name, each in group.items()}


def nested(tensors: Tensors) -> dict[str, Tensors]:
    """Invert ``flat``; empty groups are lost."""
    groups = dict[str, Tensors]()
    for full, tensor in tensors.items():
        group, _, name = full.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups
