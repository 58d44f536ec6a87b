"""The machine and versions of a measurement."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import collapipe


def machine() -> dict[str, object]:
    """Number of cores, platform and versions."""
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "collapipe": collapipe.__version__,
    }


def record(
    load: str, seeds: Sequence[int], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> dict[str, object]:
    """The content of a file in ``results``: rows, command, machine, seeds, commit and date.
    ``load`` describes other work of the machine; the load average includes this measurement."""
    known = machine()
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "machine": f"{known['cores']} cores, Python {known['python']}, torch {known['torch']}",
        "load": f"{load}; load average at the end {os.getloadavg()[0]:.1f}",
        "seeds": [*seeds],
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "columns": [*columns],
        "rows": [[*row] for row in rows],
    }


def _commit() -> str:
    """The commit of this folder; ``unknown`` outside a repository."""
    git = "git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
