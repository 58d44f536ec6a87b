"""Rounds that are decided and cost time, and train nothing."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.seeds import derive
from optim.planner import RoundRequest
from server_app.rounds.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """A round's report, what it was planned from, and how long its planning took."""

    report: RoundReport
    request: RoundRequest
    plan_s: float


def dry_run(
    settings: Settings, scheduler: Scheduler, rounds: Iterable[int]
) -> Iterator[PlannedRound]:
    """Decide one round after the other; each is over before it is handed out.

    All units finish, with losses that are drawn anew in every round: strategies that look at losses
    choose by chance. Raises as ``Scheduler.decide``.
    """
    for number in rounds:
        began = time.perf_counter()
        decision = scheduler.decide(number)
        plan_s = time.perf_counter() - began
        rng = np.random.default_rng(derive(settings.seed, "losses", number))
        losses = rng.random(settings.federation.num_units).tolist()
        scheduler.end(decision, dict(enumerate(losses)), {}, plan_s)
        units = [cluster.unit for cluster in decision.plan.clusters]
        yield PlannedRound(scheduler.report(decision, units, {}), decision.request, plan_s)
