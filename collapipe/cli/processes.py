"""The processes that a simulation started, also those whose parent has gone, and their end."""

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

_GRACE_SECONDS = 15.0  # an interrupted simulation runs its exit handlers, then 5 s at most
_POLL_SECONDS = 0.1


def end_all(home: Path, root: int | None = None) -> None:
    """End ``root`` and everything that descends from it or has ``home`` as its FLWR_HOME.

    The simulation first, as ``flwr stop`` would but at once: SIGINT runs Flower's exit handlers.
    (Its SIGTERM belongs to Ray, which would run none.)  Whoever outstays the time of grace or
    a second Ctrl-C is killed.
    """
    family = Family(home, root)
    try:
        family.signal(signal.SIGINT, "flwr-simulation")
        family.signal(signal.SIGTERM, "flower-superlink")
    finally:
        family.signal(signal.SIGKILL)


class Family:
    """The living processes of one FLWR_HOME.

    Ray's workers overwrite their environment with their title, so that only their parents give
    them away: a process that was found once is remembered, should its parent end first.
    """

    def __init__(self, home: Path, root: int | None) -> None:
        self._home, self._root = str(home), root
        self._members: set[psutil.Process] = set()  # equal by id and time of birth

    def signal(self, number: signal.Signals, name: str = "") -> None:
        """Send a signal to the members with this command and wait until they are gone."""
        deadline = time.monotonic() + _GRACE_SECONDS
        asked: set[psutil.Process] = set()
        while (targets := self.named(name)) and time.monotonic() < deadline:
            for process in targets - asked:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            asked |= targets
            time.sleep(_POLL_SECONDS)

    def named(self, name: str) -> set[psutil.Process]:
        """The members whose command has ``name`` in it."""
        found = {p for p in psutil.process_iter() if self._is_member(p)}
        for process in tuple(found):
            with suppress(psutil.NoSuchProcess):
                found |= set(process.children(recursive=True))
        self._members = {process for process in found if _is_alive(process)}
        return {process for process in self._members if name in _command(process)}

    def _is_member(self, process: psutil.Process) -> bool:
        if process in self._members or process.pid == self._root:
            return True
        with suppress(psutil.Error, OSError):
            return bool(process.environ().get("FLWR_HOME") == self._home)
        return False  # somebody else's, whose environment is not ours to read


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
