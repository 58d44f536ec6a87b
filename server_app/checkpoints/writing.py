"""Write a run's checkpoints while it trains."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from collapipe.config import Settings
from collapipe.errors import CollaPipeError, cause_of
from collapipe.runs.folder import RunFolder
from collapipe.text.tokenizer import Tokenizer
from server_app.checkpoints.file import Checkpoint, Progress, name_of, tokenizer_digest
from server_app.checkpoints.folder import CheckpointFolder
from server_app.records.summary import History
from server_app.rounds.results import RunState, Store
from server_app.units import Kept

_log = logging.getLogger(__name__)


class RunCheckpoints:
    """Writes a run's checkpoints: every ``federation.checkpoint_every`` rounds, and after the last
    round, so that a complete run can be extended.

    If a checkpoint cannot be written, for example because the disk is full, the run continues
    without it and logs a warning.
    """

    def __init__(self, settings: Settings, folder: RunFolder, tokenizer: Tokenizer) -> None:
        self._settings, self._folder, self._tokenizer = settings, folder, tokenizer
        self._files = CheckpointFolder(folder.path)
        self._stored: set[int] | None = None  # units in the current checkpoint; None without one

    def begin(self, round_: int) -> Store | None:
        """Begin the round's checkpoint. Returns a function that stores a unit's state in it, or
        None if no checkpoint is due."""
        if not self._due(round_):
            return None
        self._stored = set()
        with self._abandoned_on_errors(round_):
            self._files.begin(name_of(round_))
        return lambda unit, kept: self._store(round_, unit, kept)

    def write(self, history: History, state: RunState, names: Mapping[str, int]) -> None:
        """Complete the round's checkpoint if one is due. The round's records and weights must
        already be in the run's folder.

        For a unit that is absent, or whose state was invalid, the state of the previous checkpoint
        is copied.
        """
        if self._stored is not None:
            with self._abandoned_on_errors(history.num_rounds):
                self._complete(history, state, names, self._stored)
        self._stored = None

    def abandon(self, round_: int, why: Exception) -> bool:
        """Remove the partial checkpoint of a round, to free disk space, and log a warning.

        Returns whether one was due.
        """
        if self._stored is None:
            return False
        self._stored = None
        self._files.clear()
        _log.warning(
            "round %d: no checkpoint is written to %s (%s); correct this before the next one",
            *(round_, self._folder.path, cause_of(why)),
        )
        return True

    def _due(self, round_: int) -> bool:
        every, last = self._settings.federation.checkpoint_every, self._settings.federation.rounds
        return bool(every) and (round_ % every == 0 or round_ == last)

    def _store(self, round_: int, unit: int, kept: Kept) -> bool:
        if self._stored is not None:
            with self._abandoned_on_errors(round_):
                self._files.add(name_of(round_), unit, kept)
                self._stored.add(unit)
        return self._stored is not None

    def _complete(
        self, history: History, state: RunState, names: Mapping[str, int], stored: set[int]
    ) -> None:
        progress = Progress(
            history.num_rounds,
            time.perf_counter() - history.start,
            tokenizer_digest(self._tokenizer),
            self._folder.sizes(),
            state.scheduler,
            replace(history, start=0.0),
            dict(names),
            self._folder.frozen,
        )
        federation, before = self._settings.federation, self._files.kept
        checkpoint = Checkpoint(self._settings.tree, progress, state.training)
        for unit in before.keys() & {*range(federation.num_units)} - stored:
            self._files.add(checkpoint.name, unit, before[unit])
        self._files.write(checkpoint, federation.keep)

    @contextmanager
    def _abandoned_on_errors(self, round_: int) -> Iterator[None]:
        """Abandon the round's checkpoint if the block fails."""
        try:
            yield
        except (CollaPipeError, OSError, KeyError) as error:
            self.abandon(round_, error)
