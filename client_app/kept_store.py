"""Store a deployed unit's state on its owner's disk, so that a restarted process can continue.

A run has its state after its last round, and before that round. A new run removes the files of
earlier runs; one that is still under way writes its own again. Only the owner may read the files.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save

from collapipe.errors import ConfigError, cause_of
from collapipe.process import files
from collapipe.tensors import Tensors
from collapipe.wire.kept_file import flat, nested
from collapipe.wire.parts import DAMAGED

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptStore:
    """The files of runs in ``folder``, which are replaced as a whole. They have messages as JSON,
    and groups of tensors, by name."""

    folder: Path

    def read(self, run: int) -> tuple[dict[str, str], dict[str, Tensors]]:
        """Read this run's state. If it has none, the files of other runs are removed. If the file
        cannot be read, it is removed with a warning, and the state is empty."""
        last, before = self._files(run)
        starts = not (last.exists() or before.exists())
        for pattern in ("[0-9]*.safetensors", files.PARTIAL) if starts else (files.PARTIAL,):
            for other in self.folder.glob(pattern):
                other.unlink()
        return _read(last if last.exists() else before)  # after a kill only ``before`` may exist

    def go_back(self, run: int) -> tuple[dict[str, str], dict[str, Tensors]]:
        """Restore and read this run's state from before the last round; delete the later state."""
        last, before = self._files(run)
        last.unlink(missing_ok=True)
        if before.exists():
            before.replace(last)
        return _read(last)

    def write(
        self,
        run: int,
        messages: Mapping[str, str],
        groups: Mapping[str, Tensors],
        after_round: bool = False,
    ) -> None:
        """Replace the stored state. After a round, the old state is retained as the state before
        the round. If writing fails, both states are deleted, because they are out of date; on a
        read-only file system they stay, as if the process had been killed before."""
        last, before = self._files(run)
        try:
            if after_round and last.exists():
                last.replace(before)
            files.replace(last, save(flat(groups), dict(messages)), files.PRIVATE)
        except (ConfigError, OSError) as error:
            with suppress(OSError):
                for file in (last, before):
                    file.unlink(missing_ok=True)
            _log.warning("state is not stored, a restart would lose it: %s", error)

    def _files(self, run: int) -> tuple[Path, Path]:
        """Return the files of ``run`` after and before its last round."""
        return self.folder / f"{run}.safetensors", self.folder / f"{run}.before.safetensors"


def _read(file: Path) -> tuple[dict[str, str], dict[str, Tensors]]:
    if not file.exists():
        return {}, {}
    try:
        with safe_open(file, "pt") as opened:
            messages = dict(opened.metadata() or {})
        return messages, nested(load_file(file))
    except (OSError, *DAMAGED) as error:
        _log.warning("%s: cannot be read (%s); starts with empty state", file, cause_of(error))
        file.unlink()
        return {}, {}
