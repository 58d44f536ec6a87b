"""What ended a run that Flower started, told from its ServerApp to the command that waits."""

import json
from pathlib import Path

from collapipe.errors import CollaPipeError, ConfigError, RoundFailedError, printable

_FILE = "failure.json"  # in the run's folder


def write_failure(run_dir: Path, error: CollaPipeError) -> None:
    """Where there is such a folder."""
    if run_dir.is_dir():
        told = {"error": printable(str(error)), "exit_status": error.exit_status}
        (run_dir / _FILE).write_text(json.dumps(told), encoding="utf-8")


def take_failure(run_dir: Path) -> CollaPipeError:
    """The error, which is told once."""
    file = run_dir / _FILE
    if not file.exists():
        return RoundFailedError("the run failed; its last lines above say why")
    told = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    kind = ConfigError if told["exit_status"] == ConfigError.exit_status else RoundFailedError
    return kind(told["error"])
