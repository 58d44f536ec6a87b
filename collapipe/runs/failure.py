"""Pass the error that ended a run from Flower's ServerApp to the command that waits for the run."""

import json
from pathlib import Path

from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError, printable
from collapipe.process import files
from collapipe.runs.reading import how_to_go_on

_FILE = "failure.json"  # in the run's folder
_BEGUN, _ENDED = "config.yaml", "summary.json"  # written when a run begins, and when it ends


def write_failure(run_dir: Path, error: CollaPipeError) -> bool:
    """Write the error and its exit status to the run's folder. Return whether it exists and has
    room."""
    record = {"error": printable(str(error)), "exit_status": error.exit_status}
    try:
        files.replace(run_dir / _FILE, json.dumps(record).encode())
    except ConfigError:
        return False
    return True


def take_failure(run_dir: Path, how: str) -> CollaPipeError:
    """Return the error that ended the run, and remove its file.

    If the server's app was killed, the error names ``how``, the command that resumes the run.
    """
    file = run_dir / _FILE
    if file.exists():
        record = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        kind = ConfigError if record["exit_status"] == ConfigError.exit_status else RoundFailedError
        return kind(record["error"])
    why = "the run failed; its last lines above say why"
    if not (run_dir / _BEGUN).exists():
        why = (
            "the run failed before it began: the last lines above say why, or else the server's app"
            " was killed; start it again"
        )
    elif not (run_dir / _ENDED).exists():
        why = (
            f"{run_dir}: the server's app was killed, or its machine had no memory left; "
            f"{how_to_go_on(run_dir, how)}"
        )
    return RoundFailedError(why)
