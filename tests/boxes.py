"""Processes of ``collapipe device``, one at each place, with credentials of a temporary
authority."""

import subprocess
import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority
from collapipe.credentials.credentials import load
from collapipe.wire.streams.channels import Dialer
from tests.network import Place

_READY = ": ready on "


@dataclass(frozen=True, slots=True)
class Box:
    """A daemon's process and its address."""

    name: str
    address: str
    process: subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Daemons and the dialer that reaches them; ``begin`` starts another process of a daemon at a
    port."""

    daemons: MutableSequence[Box]
    dialer: Dialer
    begin: Callable[[int, int], subprocess.Popen[str]]

    def again(self, number: int) -> Box:
        """Start a killed daemon again at its port, and return it once it is ready."""
        old = self.daemons[number]
        process = self.begin(number, int(old.address.rpartition(":")[2]))
        self.daemons[number] = Box(old.name, _address(process), process)
        return self.daemons[number]


@contextmanager
def boxes(folder: Path, places: Sequence[Place], memory: str = "1GB") -> Iterator[Boxes]:
    """Start a daemon at each place, named device-0, device-1, …; their logs are in ``folder``."""
    names = [f"device-{number}" for number in range(len(places))]
    credentials = temporary_authority(folder / "credentials", names)
    started = list[subprocess.Popen[str]]()

    def begin(number: int, port: int) -> subprocess.Popen[str]:
        name, place = names[number], places[number]
        own = "--listen", f"{place.host}:{port}", "--credentials", str(credentials[name])
        command = [*place.command, sys.executable, "-m", "collapipe", "device", *own]
        command += ["--memory", memory]
        with (folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        started.append(process)
        return process

    try:
        for number in range(len(places)):
            begin(number, 0)
        daemons = [
            Box(name, _address(each), each)
            for name, each in zip(names, tuple(started), strict=True)
        ]
        yield Boxes(daemons, Dialer(load(credentials[CONTROL_UNIT])), begin)
    finally:
        _end(started)


def _address(process: subprocess.Popen[str]) -> str:
    """Return the daemon's address once it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert _READY in line, "a daemon did not start; see its log"
    return line.rpartition(_READY)[2].strip()


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill the processes, like a power loss: a regular exit takes longer than a test."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
