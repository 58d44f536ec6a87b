"""Ask a strategy for a round's plan, and accept only a valid one."""

import json
from dataclasses import asdict

import numpy as np
from pydantic import TypeAdapter

from collapipe.errors import ConfigError, InfeasibleRoundError, faults_of
from collapipe.plan import RoundPlan
from collapipe.validation import fault_of, returned
from optim.planner import Planner, RoundRequest
from optim.verify import verify_plan

_PLAN = TypeAdapter(RoundPlan)


def planned(strategy: Planner, request: RoundRequest, rng: np.random.Generator) -> RoundPlan:
    """Return the strategy's plan as ``accepted``.

    Raises like ``plan_round`` and ``accepted``, and ``ConfigError`` if the strategy changed its
    request, because the plan would be verified against these changes.
    """
    source, before = _source(strategy), _written(request, strategy)
    infeasible = None
    try:
        with faults_of(source):
            plan = strategy.plan_round(request, rng)
    except InfeasibleRoundError as error:
        infeasible = error
    if _written(request, strategy) != before:
        raise ConfigError(f"{source}: changed its request; use dataclasses.replace instead")
    if infeasible is not None:
        raise infeasible
    return accepted(plan, strategy, request)


def accepted(plan: object, strategy: Planner, request: RoundRequest) -> RoundPlan:
    """Return the verified ``plan`` of a strategy, with Python's numbers in place of numpy's.

    Raises ``ConfigError`` for a plan that cannot be recorded, and ``PlanViolationError`` for one
    that violates a constraint.
    """
    source = _source(strategy)
    try:
        tree = asdict(returned(plan, RoundPlan, source))
        text = json.dumps(tree, default=lambda each: each.tolist())
        plain = _PLAN.validate_python(json.loads(text))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {fault_of(error)}") from error
    verify_plan(plain, request)
    return plain


def _written(request: RoundRequest, strategy: Planner) -> str:
    """Return the request as text; empty for strategies of this package, which do not change it, as
    the texts of 10,000 units would double the time of a round."""
    return "" if type(strategy).__module__.startswith("optim.") else repr(request)


def _source(strategy: Planner) -> str:
    return f"strategy: {type(strategy).__qualname__}.plan_round"
