"""What a round leaves: its result, and all that training has come to."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.seeds import derive
from collapipe.tensors import Tensors
from optim.planner import RoundRequest
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.scheduler import Scheduler, SchedulerState
from server_app.units import Kept


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What training has come to; all empty in a run that does not train.

    ``weights`` and ``own_models`` as ``GlobalModel`` has them; the memories of the server's
    optimiser and, by unit, of the heads' ones; what each unit keeps: its optimiser's memory, and
    what its compressed uploads have lacked so far; the server's ``activations`` of each unit;
    the last norms of units' updates; and the account of ``PrivateMean``. ``units`` of a checkpoint
    are on the disk, and read one at a time.
    """

    weights: Tensors = field(default_factory=dict)
    own_models: dict[int, Tensors] = field(default_factory=dict)
    server_optimizer: Tensors = field(default_factory=dict)
    heads: dict[int, Tensors] = field(default_factory=dict)
    units: Mapping[int, Kept] = field(default_factory=dict)
    activations: dict[int, Tensors] = field(default_factory=dict)
    update_norms: Tensors = field(default_factory=dict)
    privacy: Tensors = field(default_factory=dict)


Store = Callable[[int, Kept], bool]
"""Takes what a unit keeps, for a checkpoint; returns whether it takes that of others, too."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round that is over: its report, what it was planned from, and wall time of its phases.

    ``model`` is None where nothing was trained. ``bytes_down`` were sent since the last round and
    are not of the round: weights that do not train, and states that were restored.
    ``training_state`` is that of the server, without ``units``.
    """

    report: RoundReport
    request: RoundRequest
    seconds: dict[str, float]
    scheduler: SchedulerState
    model: GlobalModel | None = None
    bytes_down: int = 0
    training_state: Callable[[], TrainingState] = TrainingState


def dry_run(
    settings: Settings, scheduler: Scheduler, rounds: Iterable[int], keep_losses: bool = False
) -> Iterator[RoundResult]:
    """Decide one round after the other and count what it costs; nothing is trained.

    All units finish, with losses that are drawn anew in every round: strategies that look at losses
    choose by chance. With ``keep_losses`` each unit has one loss for all rounds, as where some
    units' rows stay harder than others'. Raises as ``Scheduler.decide``.
    """
    for number in rounds:
        began = time.perf_counter()
        decision = scheduler.decide(number)
        plan_s = time.perf_counter() - began
        rng = np.random.default_rng(derive(settings.seed, "losses", 0 if keep_losses else number))
        losses = rng.random(settings.federation.num_units).tolist()
        units = tuple(cluster.unit for cluster in decision.plan.clusters)
        report = scheduler.end(decision, dict(enumerate(losses)), {}, plan_s, units=units)
        seconds = {"plan": plan_s, "round": plan_s}
        yield RoundResult(report, decision.request, seconds, scheduler.state)
