"""Whether a run's modelled figures hold its uploads: a strategy may plan no channels for them."""

from typing import Literal

from collapipe.formatting import seconds
from collapipe.runs.reading import Run

Uploads = Literal["all", "some", "none"]
_MISSING: dict[Uploads, str] = {
    "all": "",
    "some": "uploads counted in some rounds only",
    "none": "uploads not counted",
}


def counted_uploads(run: Run) -> Uploads:
    """Of how many of its planned rounds the cost holds every unit's upload."""
    planned = [line.costs.values() for line in run.rounds if line.costs]
    held = [all(cost.upload_s is not None for cost in costs) for costs in planned]
    if all(held):
        return "all"
    return "some" if any(held) else "none"


def missing_uploads(run: Run) -> str:
    """What is to be said of the run's modelled seconds and joules; nothing where all is counted."""
    return _MISSING[counted_uploads(run)]


def missing_in_clock(run: Run) -> str:
    """Likewise of its clock, which may be a measured one."""
    return missing_uploads(run) if run.clock.kind == "modelled" else ""


def clock_told(run: Run) -> str:
    """When the last round ended, and what that counts; nothing before the first one's end."""
    if not run.rounds:
        return ""
    parts = (seconds(run.clock.ends_s[-1]), run.clock.kind, missing_in_clock(run))
    return ", ".join(part for part in parts if part)
