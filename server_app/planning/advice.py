"""Advice in the log, once for each unit: how it could train faster, and why it cannot train."""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from collapipe.errors import Called, InfeasibleRoundError
from collapipe.formatting import seconds
from collapipe.plan import RoundPlan
from collapipe.step_law import interval
from optim.cluster.problem import cluster_problem
from optim.planner import Planner, RoundRequest, present_devices
from optim.problem import Latency
from optim.sharing.bounds import least_batch_s
from optim.sharing.modes import no_plan

_log = logging.getLogger(__name__)


@dataclass
class Advice:
    """Compares the plans of a ``planner`` with what its strategy did not choose."""

    planner: Planner
    latency: Latency
    called: Called
    _advised: set[int] = field(init=False, default_factory=set)
    _compared: set[int] = field(init=False, default_factory=set)

    def on_sharing(self, plan: RoundPlan, request: RoundRequest, rng: np.random.Generator) -> None:
        """Name units that keep single devices if shared stages are planned to be faster by more
        than the prediction's error. ``rng`` is the plan's."""
        single = {each.unit for each in request.kept if not each.shares} - self._advised
        steps = {c.unit: c.step for c in request.clusters if c.unit in single and c.step}
        if not steps:
            return
        self._advised |= steps.keys()
        now_s = {each.unit: each.latency_s or 0.0 for each in plan.clusters}
        with suppress(InfeasibleRoundError):
            free = self.planner.plan_round(replace(request, kept=()), rng)
            for each in (each for each in free.clusters if each.shares):
                step, shared_s = steps.get(each.unit), each.latency_s or math.inf
                if step and shared_s < interval(now_s.get(each.unit, 0.0), step.spread)[0]:
                    _log.warning(
                        "%s: with shared stages its devices would take about %s instead of %s a "
                        "round; a run begins with them if its steps were measured before: "
                        "collapipe device measure FILE OPTIONS --write",
                        *(self.called(each.unit), seconds(shared_s), seconds(now_s[each.unit])),
                    )

    def on_memory(self, plan: RoundPlan, request: RoundRequest) -> None:
        """Name a unit whose devices cannot hold the model, because no round plans it.

        One unit a round is compared with the model, the one with the longest queue.
        """
        known = self._compared | {each.unit for each in plan.clusters}
        waiting = [
            (queue, cluster)
            for queue, cluster in zip(request.queues, request.clusters, strict=True)
            if cluster.unit not in known and not cluster.step and present_devices(cluster)
        ]
        if not (plan.clusters and waiting):
            return
        _, cluster = max(waiting, key=lambda pair: pair[0])
        self._compared.add(cluster.unit)
        problem = cluster_problem(request, cluster, self.latency)
        if math.isinf(least_batch_s(problem)):
            unit = self.called(cluster.unit)
            _log.warning("%s: no round can plan it: %s", unit, no_plan(problem))
