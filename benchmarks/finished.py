"""Finished runs of a benchmark, which are reused only if their options are the same."""

import json
from collections.abc import Sequence
from pathlib import Path

_NAME = "benchmark.json"


def finished(run_dir: Path, overrides: Sequence[str]) -> bool:
    """Whether ``run_dir`` has a finished run. Raises ``SystemExit`` if its options differ."""
    if not (run_dir / _NAME).exists():
        return False
    if json.loads((run_dir / _NAME).read_text()) != list(overrides):
        raise SystemExit(f"{run_dir}: was run with other options; remove it, or set --output")
    return True


def remember(run_dir: Path, overrides: Sequence[str]) -> None:
    """Mark the run as finished with these options."""
    (run_dir / _NAME).write_text(json.dumps(list(overrides)))
