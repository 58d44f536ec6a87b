"""When a run writes a checkpoint, and what of."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from safetensors import SafetensorError

from collapipe.config import Settings
from collapipe.errors import CollaPipeError, one_line
from collapipe.runs.folder import RunFolder
from collapipe.text.tokenizer import Tokenizer
from server_app.checkpoints.checkpoint import Checkpoint, Progress, tokenizer_digest
from server_app.checkpoints.file import CheckpointFolder
from server_app.records.summary import History
from server_app.rounds.results import TrainingState
from server_app.rounds.scheduler import SchedulerState

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes every ``federation.checkpoint_every`` rounds, and after the last one, so that a run
    that is complete can be given more."""

    def __init__(
        self, settings: Settings, folder: RunFolder, tokenizer: Tokenizer, history: History
    ) -> None:
        self._settings, self._folder, self._history = settings, folder, history
        self._tokenizer = tokenizer_digest(tokenizer)
        self._checkpoints = CheckpointFolder(folder.path)

    def after(
        self, round_: int, state: SchedulerState, training: Callable[[], TrainingState]
    ) -> None:
        """Write one if it is time, once the round's lines and weights are in the folder.

        ``training`` asks the units. Where one does not answer, or sends more than a file can hold,
        or the disk is full, the run goes on without.
        """
        federation = self._settings.federation
        every, last = federation.checkpoint_every, round_ == federation.rounds
        if not every or (round_ % every and not last):
            return
        try:
            checkpoint = Checkpoint(self._settings.tree, self._progress(round_, state), training())
            self._checkpoints.write(checkpoint, federation.keep)
        except (CollaPipeError, OSError, SafetensorError) as error:
            _log.warning("round %d: no checkpoint is written: %s", round_, one_line(error))

    def _progress(self, round_: int, state: SchedulerState) -> Progress:
        return Progress(
            round=round_,
            wall_s=time.perf_counter() - self._history.start,
            tokenizer=self._tokenizer,
            sizes=self._folder.sizes(),
            scheduler=state,
            history=replace(self._history, start=0.0),
        )


def history_of(progress: Progress) -> History:
    """The history so far, as of a run that began ``progress.wall_s`` ago."""
    return replace(progress.history, start=time.perf_counter() - progress.wall_s)
