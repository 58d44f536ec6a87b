"""Tolerances of comparisons, and the error for an answer that fails a check."""

import math

from collapipe.errors import PlanViolationError
from collapipe.plan import Certificate

TOLERANCE = 1e-9  # relative
MARGIN = 1 - 1e-12  # share of a budget for answers that refute a bound: feasible beyond rounding


def violation(constraint: str, what: str) -> PlanViolationError:
    """Make the error of a plan that breaks ``constraint``."""
    return PlanViolationError(
        f"{constraint}: {what}; the plan is wrong, not the input: correct plan_round of your "
        "strategy, or choose another solver and report this error"
    )


def exceeds(value: float, limit: float) -> bool:
    """Whether value > limit beyond rounding; NaN always is."""
    return not value <= limit + TOLERANCE * abs(limit)


def differs(value: float, expected: float) -> bool:
    """Whether value ≠ expected beyond rounding; NaN and infinity always are."""
    return not abs(value - expected) <= TOLERANCE * max(abs(value), abs(expected))


def is_count(number: object) -> bool:
    """Whether ``number`` is a whole number ≥ 0; NumPy's integers count."""
    return hasattr(number, "__index__") and number >= 0  # type: ignore[operator]


def check_certificate(certificate: Certificate, objective: float) -> None:
    """Check the objective, a finite lower bound that does not exceed it, and the gap. Raises
    ``PlanViolationError``."""
    claimed, bound = certificate.objective, certificate.lower_bound
    if not math.isfinite(objective) or differs(claimed, objective):
        raise violation("objective", f"certified as {claimed:.12g}, expected {objective:.12g}")
    if not math.isfinite(bound) or exceeds(bound, claimed):
        raise violation("lower bound", f"{bound:.12g}, the objective is {claimed:.12g}")
    if claimed == 0 and bound != 0:
        raise violation("gap", f"undefined for objective 0 with lower bound {bound:.12g}")
    gap = (claimed - bound) / abs(claimed) if claimed != bound else 0.0
    if differs(certificate.gap, gap):
        raise violation("gap", f"{certificate.gap:.12g}, expected {gap:.12g}")
