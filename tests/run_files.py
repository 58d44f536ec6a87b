"""What a run's folder says about its rounds and its end, as plain values."""

import json
from pathlib import Path
from typing import Any


def rounds_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of all rounds, from ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of ``summary.json``."""
    return dict(json.loads((run_dir / "summary.json").read_text()))
