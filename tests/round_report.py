"""A round's report without any events, for tests that set some fields."""

from typing import Any

from collapipe.plan import RoundPlan
from collapipe.report import RoundCost, RoundReport
from collapipe.state import Estimates


def round_report(number: int = 1, **fields: Any) -> RoundReport:
    """Return a report in which the clock shows 12 s and nothing else happened, except
    ``fields``."""
    defaults: dict[str, Any] = {
        "plan": RoundPlan(number, ()),
        "cost": RoundCost(0.0, ()),
        "clock_s": 12.0,
        "skipped": None,
        "excluded": {},
        "queues": (),
        "error_queues": (),
        "units": (),
        "failures": {},
        "train_loss": None,
        "estimates": Estimates(),
        "samples": 0,
        "target_tokens": 0,
        "input_tokens": 0,
        "bytes_up": 0,
        "bytes_down": 0,
        "seconds": {},
    }
    return RoundReport(round=number, **(defaults | fields))
