"""What a deployed unit keeps in a run, on its owner's disk: a process that starts anew goes on.

Of the last run alone, after its last round and before it; only its owner may read the files.
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
from collapipe.wire.kept_file import flat, nested

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptStore:
    """``folder`` holds one run's files, which are replaced as a whole: messages as JSON, and groups
    of tensors, by their names."""

    folder: Path

    def read(self, run: int) -> tuple[dict[str, str], dict[str, Tensors]]:
        """What was kept in this run; what was kept in others is removed. Nothing where the file
        cannot be read; it is removed, which the log says."""
        last, before = self._only(run)
        return _read(last if last.exists() else before)  # a process was killed between the two

    def go_back(self, run: int) -> tuple[dict[str, str], dict[str, Tensors]]:
        """What was kept in this run before the last round, which is forgotten."""
        last, before = self._only(run)
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
        """Replace what was kept, or after a round add to it. Where that fails, nothing is kept
        rather than what is out of date."""
        last, before = self._only(run)
        if after_round and last.exists():
            last.replace(before)
        try:
            files.replace(last, save(flat(groups), dict(messages)), files.PRIVATE)
        except ConfigError as error:
            for file in (last, before):
                file.unlink(missing_ok=True)
            _log.warning("a restart would forget this run: %s", error)

    def _only(self, run: int) -> tuple[Path, Path]:
        """The files of ``run``, after its last round and before it; beside them are no others."""
        own = self.folder / f"{run}.safetensors", self.folder / f"{run}.before.safetensors"
        for pattern in ("[0-9]*.safetensors", ".*.partial"):  # which a killed process may leave
            for other in self.folder.glob(pattern):
                if other not in own:
                    other.unlink()
        return own


def _read(file: Path) -> tuple[dict[str, str], dict[str, Tensors]]:
    if not file.exists():
        return {}, {}
    try:
        with safe_open(file, "pt") as opened:
            messages = dict(opened.metadata() or {})
        return messages, nested(load_file(file))
    except (OSError, SafetensorError) as error:
        _log.warning("%s: cannot be read (%s); begins afresh", file, one_line(error))
        file.unlink()
        return {}, {}
