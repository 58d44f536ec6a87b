"""The lock of a run's folder, which tells whether a run is going on."""

import fcntl
from pathlib import Path

LOCK = ".lock"


def is_writing(run_dir: Path) -> bool:
    """Whether a process writes a run here: the system frees the lock whatever ends the process."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run has begun here
        return False
    return False
