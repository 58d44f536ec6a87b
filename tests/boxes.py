"""Daemons as they run on boxes: processes of ``collapipe device``, each at a place, with
credentials of one temporary authority."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority
from collapipe.credentials.credentials import load
from collapipe.wire.dialing import Dialer
from tests.network import Place

_READY = ": ready on "


@dataclass(frozen=True, slots=True)
class Box:
    """A daemon's process, and where it listens."""

    name: str
    address: str
    process: subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Daemons, and what a control unit dials them with."""

    daemons: Sequence[Box]
    dialer: Dialer


@contextmanager
def boxes(folder: Path, places: Sequence[Place], memory: str = "1GB") -> Iterator[Boxes]:
    """A daemon at each place, named device-0 … in their order; ``folder`` keeps what they log."""
    names = [f"device-{number}" for number in range(len(places))]
    credentials = temporary_authority(folder / "credentials", names)
    started = list[subprocess.Popen[str]]()
    try:
        for name, place in zip(names, places, strict=True):
            own = "--listen", f"{place.host}:0", "--credentials", str(credentials[name])
            command = [*place.command, sys.executable, "-m", "collapipe", "device", *own]
            with (folder / f"{name}.log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [*command, "--memory", memory],
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        daemons = [
            Box(name, _address(each), each) for name, each in zip(names, started, strict=True)
        ]
        yield Boxes(daemons, Dialer(load(credentials[CONTROL_UNIT])))
    finally:
        _end(started)


def _address(process: subprocess.Popen[str]) -> str:
    """Once it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert _READY in line, "a daemon did not start; see its log"
    return line.rpartition(_READY)[2].strip()


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """As a box ends that is switched off: the interpreter's own end takes longer than a test."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
