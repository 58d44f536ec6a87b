"""What a deployed unit keeps in a run, on its owner's disk: a process that starts anew goes on.

One file, of the last run alone; only its owner may read it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from collapipe.credentials import files
from collapipe.errors import ConfigError, one_line
from collapipe.tensors import Tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptStore:
    """``folder`` holds one run's file, which is replaced as a whole: messages as JSON, and groups
    of tensors, by their names."""

    folder: Path

    def read(self, run: int) -> tuple[dict[str, str], dict[str, Tensors]]:
        """What was kept in this run; what was kept in others is removed. Nothing where the file
        cannot be read; it is removed, which the log says."""
        file, groups = self._only(run), dict[str, Tensors]()
        if not file.exists():
            return {}, {}
        try:
            with safe_open(file, "pt") as opened:
                messages = dict(opened.metadata() or {})
            for full, tensor in load_file(file).items():
                group, _, name = full.partition("/")
                groups.setdefault(group, {})[name] = tensor
        except (OSError, SafetensorError) as error:
            _log.warning("%s: cannot be read (%s); begins afresh", file, one_line(error))
            file.unlink()
            return {}, {}
        return messages, groups

    def write(self, run: int, messages: Mapping[str, str], groups: Mapping[str, Tensors]) -> None:
        """Replace the file. Where that fails, nothing is kept rather than what is out of date."""
        file = self._only(run)
        tensors = {f"{key}/{name}": t for key, group in groups.items() for name, t in group.items()}
        try:
            files.replace(file, save(tensors, dict(messages)), files.PRIVATE)
        except ConfigError as error:
            file.unlink(missing_ok=True)
            _log.warning("a restart would forget this run: %s", error)

    def _only(self, run: int) -> Path:
        """The file of ``run``, beside which there is no other."""
        file = self.folder / f"{run}.safetensors"
        for pattern in ("[0-9]*.safetensors", ".*.partial"):  # which a killed process may leave
            for other in self.folder.glob(pattern):
                if other != file:
                    other.unlink()
        return file
