"""The processes that a simulation started, also those whose parent has gone, and their end."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GRACE_SECONDS = 15.0  # an interrupted simulation runs its exit handlers, then 5 s at most
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Process:
    """A row of the process table; its birth tells two owners of one id apart."""

    parent: int
    birth: str
    command: str


def end_all(home: Path, root: int | None = None) -> None:
    """End ``root`` and everything that descends from it or has ``home`` as its FLWR_HOME.

    The simulation first, as ``flwr stop`` would but at once: SIGINT runs Flower's exit handlers.
    (Its SIGTERM belongs to Ray, which would run none.)  Whoever outstays the time of grace or
    a second Ctrl-C is killed.
    """
    family = _Family(home, root)
    try:
        family.signal(signal.SIGINT, "flwr-simulation")
        family.signal(signal.SIGTERM, "flower-superlink")
    finally:
        family.signal(signal.SIGKILL)


class _Family:
    """The living processes of one FLWR_HOME.

    Ray's workers overwrite their environment with their title, so that only their parents give
    them away: whoever was seen once is remembered, should its parent go first.
    """

    def __init__(self, home: Path, root: int | None) -> None:
        self._home = home
        self._root = root
        self._members: dict[int, _Process] = {}

    def signal(self, number: signal.Signals, name: str = "") -> None:
        """Send a signal to the members with this command and wait until they are gone."""
        deadline = time.monotonic() + _GRACE_SECONDS
        asked: set[int] = set()
        while (targets := self._named(name)) and time.monotonic() < deadline:
            for pid in targets - asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            asked |= targets
            time.sleep(_POLL_SECONDS)

    def _named(self, name: str) -> set[int]:
        self._look()
        return {pid for pid, process in self._members.items() if name in process.command}

    def _look(self) -> None:
        processes = _processes()
        found = {pid for pid, process in processes.items() if self._is_member(pid, process)}
        new = found
        while new:
            new = {pid for pid, process in processes.items() if process.parent in new} - found
            found |= new
        self._members = {pid: processes[pid] for pid in found}

    def _is_member(self, pid: int, process: _Process) -> bool:
        known = self._members.get(pid)
        seen_before = known is not None and known.birth == process.birth
        return seen_before or pid == self._root or _has_home(pid, self._home)


def _has_home(pid: int, home: Path) -> bool:
    """Tell whether the process was started with this FLWR_HOME; known on Linux only."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"FLWR_HOME={home}".encode() in variables


def _processes() -> dict[int, _Process]:
    """Return the machine's living processes by their id."""
    if not Path("/proc/self/stat").exists():
        return _from_ps()
    found = {int(folder.name): _from_proc(folder) for folder in Path("/proc").glob("[0-9]*")}
    return {pid: process for pid, process in found.items() if process is not None}


def _from_proc(folder: Path) -> _Process | None:
    """Read ``/proc/PID``; None for a zombie and for a process that is gone by now."""
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        command = (folder / "cmdline").read_text(errors="replace")
    except OSError:
        return None
    return None if fields[0] == "Z" else _Process(int(fields[1]), fields[19], command)


def _from_ps() -> dict[int, _Process]:
    """Ask ``ps``, where there is no ``/proc``; its ``lstart`` is a date of five words."""
    columns = [f"-o{name}=" for name in ("pid", "ppid", "state", "lstart", "args")]
    listing = subprocess.run(  # noqa: S603 - no shell, nothing from outside
        ["ps", "-A", *columns],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split(maxsplit=8) for line in listing.stdout.splitlines()]
    return {
        int(row[0]): _Process(int(row[1]), " ".join(row[3:8]), row[-1])
        for row in rows
        if not row[2].startswith("Z")
    }
