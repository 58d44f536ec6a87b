"""Daemons in processes of their own, as on a box."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
COMMAND = "from collapipe.cli.app import main\nmain()\n"
# Prints which modules it has imported when it is asked.
TELLING = f"""\
import json, os, signal, sys
# not by print, which may be under way where the signal comes
told = lambda: json.dumps(sorted(sys.modules)) + "\\n"
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, told().encode()))
{COMMAND}"""


@dataclass
class DeviceProcess:
    """A daemon that is ready."""

    name: str
    address: str
    process: subprocess.Popen[str]
    log: IO[str]

    def line(self) -> str:
        """The next that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask_to_end(self) -> None:
        """As ``kill`` and systemd do."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> tuple[int, list[str], str]:
        """Status, further lines, and logs, once it has ended."""
        out, _ = self.process.communicate(timeout=60)
        self.log.seek(0)
        err = self.log.read()
        print(out[-1000:], err)  # pytest shows it where the test fails
        return self.process.returncode, out.splitlines(), err

    def modules(self) -> set[str]:
        """What a ``TELLING`` one has imported."""
        self.process.send_signal(signal.SIGUSR1)
        return set(json.loads(self.line()))


@contextmanager
def device_process(
    *options: str,
    program: str = COMMAND,
    python: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[DeviceProcess]:
    """``collapipe device --insecure`` with ``options``, by a ``program`` for Python that gets the
    options ``python`` itself; killed in the end if it has not ended."""
    command = [sys.executable, *python, "-c", program, "device", "--insecure", *options]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    with tempfile.TemporaryFile("w+") as log:  # not a pipe, which would fill up
        process = subprocess.Popen(
            command, text=True, env=variables, stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            name, ready, address = process.stdout.readline().strip().partition(": ready on ")
            device = DeviceProcess(name, address, process, log)
            if not ready:
                raise AssertionError(device.ended())
            yield device
        finally:
            process.kill()
            process.communicate()
