"""Plans whose micro-batches and shares stay from round to round, so that the weights' bits do."""

import logging
from collections.abc import Collection

from collapipe.errors import Called
from collapipe.plan import ClusterPlan, RoundPlan
from optim.planner import RoundRequest, present_devices

_log = logging.getLogger(__name__)


def next_kept(
    kept: tuple[ClusterPlan, ...],
    plan: RoundPlan,
    request: RoundRequest,
    finished: Collection[int],
    called: Called,
) -> tuple[ClusterPlan, ...]:
    """Return the kept plans with the latest devices of units that finished. A device that is
    missing does not change them: it may come back."""
    now = {each.unit: each for each in kept}
    states = {state.unit: state for state in request.clusters}
    for new in plan.clusters:
        state, before = states[new.unit], now.get(new.unit)
        same = before is not None and before.order_of_sums == new.order_of_sums
        away = before and {*before.devices} - {each.name for each in present_devices(state)}
        if state.real_devices and new.unit in finished and not (same and away):
            now[new.unit] = new
            if before and not same:
                _log.warning(
                    "%s: its plan has other micro-batches or shares than in earlier rounds, so "
                    "that the weights' last bits differ",
                    called(new.unit),
                )
    return tuple(now.values())
