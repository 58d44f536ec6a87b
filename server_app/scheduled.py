"""Rounds that are decided and cost time, and train nothing."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.seeds import derive
from optim.planner import RoundRequest
from server_app.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A round: what it came to, what it was planned from, and how long its planning took."""

    report: RoundReport
    request: RoundRequest
    plan_s: float


def scheduled(
    settings: Settings, scheduler: Scheduler, rounds: Iterable[int]
) -> Iterator[Scheduled]:
    """Decide one round after the other; each is over before it is handed out.

    All units finish, with losses that are drawn anew in every round: strategies that look at losses
    choose by chance. Raises as ``Scheduler.decide``.
    """
    for number in rounds:
        began = time.perf_counter()
        decision = scheduler.decide(number)
        plan_s = time.perf_counter() - began
        scheduler.end(decision, _made_up_losses(settings, number), {}, plan_s)
        planned = tuple(cluster.unit for cluster in decision.plan.clusters)
        report = replace(scheduler.report(decision), units=planned)
        yield Scheduled(report, decision.request, plan_s)


def _made_up_losses(settings: Settings, number: int) -> dict[int, float]:
    rng = np.random.default_rng(derive(settings.seed, "losses", number))
    return dict(enumerate(rng.random(settings.federation.num_units).tolist()))
