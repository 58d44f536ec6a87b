"""Start time and memory of an idle `collapipe device`, against a process that imports torch and
grpc.

    python -m benchmarks.device_footprint --turns 9

Both sides take turns. Each process starts and reports that it is ready. Measured are seconds and
processor seconds until then, and resident memory two seconds later. Prints the medians, their
ratios, and the machine.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.arguments import at_least
from benchmarks.machine import machine
from collapipe.credentials.authority import temporary_authority

IMPORTS = "import sys, torch, grpc; print('ready', flush=True); sys.stdin.read()"


class Footprint(NamedTuple):
    """Seconds and processor seconds until a process is ready, and its memory afterwards."""

    start_s: float
    start_cpu_s: float
    memory_mb: float


def footprint(arguments: Sequence[str]) -> Footprint:
    """Measure a Python process that prints a line with ``ready``."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        start_s, own = time.monotonic() - began, psutil.Process(process.pid)
        cpu_s = own.cpu_times().user + own.cpu_times().system
        time.sleep(2)
        memory_mb = own.memory_info().rss / 1e6
        process.terminate()
    assert "ready" in line, line
    return Footprint(start_s, cpu_s, memory_mb)


def sides(folder: Path) -> dict[str, list[str]]:
    """The arguments of both processes: the imports alone, and a daemon with credentials."""
    own = temporary_authority(folder / "credentials", ["device"])["device"]
    daemon = ["-m", "collapipe", "device", "--credentials", str(own)]
    return {"imports": ["-c", IMPORTS], "daemon": daemon}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=at_least(1), default=9)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        commands = sides(Path(folder))
        found = [{name: footprint(each) for name, each in commands.items()} for _ in range(turns)]
    print(f"{'median of ' + str(turns):<16}{'imports':>10}{'daemon':>10}{'ratio':>10}")
    for measure in Footprint._fields:
        imports, daemon = (
            statistics.median(getattr(each[name], measure) for each in found) for name in commands
        )
        print(f"{measure:<16}{imports:>10.2f}{daemon:>10.2f}{daemon / imports:>10.3f}")
    print(machine())


if __name__ == "__main__":
    main()
