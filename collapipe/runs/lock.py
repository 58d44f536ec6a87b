"""The lock of a run's folder, which shows whether a run is in progress."""

import fcntl
from pathlib import Path

LOCK = ".lock"


def is_writing(run_dir: Path) -> bool:
    """Whether a process has the folder's lock; the system frees it when the process ends."""
    try:
        with (run_dir / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run has begun here
        return False
    return False
