"""Daemons that run in separate processes."""

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
# On SIGUSR1 this program prints which modules it has imported.
MODULES_PROGRAM = f"""\
import json, os, signal, sys
# not by print, which may be under way where the signal comes
modules = lambda: json.dumps(sorted(sys.modules)) + "\\n"
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, modules().encode()))
{COMMAND}"""


@dataclass
class DeviceProcess:
    """The process of a daemon that is ready."""

    name: str
    address: str
    process: subprocess.Popen[str]
    log: IO[str]

    def line(self) -> str:
        """Return the next line that the daemon prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask_to_end(self) -> None:
        """Send SIGTERM, as ``kill`` and systemd do."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> tuple[int, list[str], str]:
        """Wait until the process ends; return its status, remaining lines of output, and logs."""
        out, _ = self.process.communicate(timeout=60)
        self.log.seek(0)
        err = self.log.read()
        print(out[-1000:], err)  # pytest shows it if the test fails
        return self.process.returncode, out.splitlines(), err

    def modules(self) -> set[str]:
        """Return the modules that a process of ``MODULES_PROGRAM`` has imported."""
        self.process.send_signal(signal.SIGUSR1)
        return set(json.loads(self.line()))


@contextmanager
def device_process(
    *options: str,
    program: str = COMMAND,
    python: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[DeviceProcess]:
    """Run ``collapipe device --insecure`` with ``options``, and kill it at the end if it still
    runs.

    ``program`` is the code that Python runs, ``python`` are options of Python itself.
    """
    command = [sys.executable, *python, "-c", program, "device", "--insecure", *options]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    with tempfile.TemporaryFile("w+") as log:  # a pipe would fill up
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
