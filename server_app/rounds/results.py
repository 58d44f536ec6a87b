"""What a round leaves: its result, and all that training has come to."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from collapipe.config import Settings
from collapipe.report import RoundReport
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from optim.planner import RoundRequest
from server_app.rounds.scheduler import Scheduler, SchedulerState, Trained
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
class RunState:
    """All that the next round depends on, beside the configuration and the seed."""

    scheduler: SchedulerState
    training: TrainingState = field(default_factory=TrainingState)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A unit that takes part from this round on: a ``new`` one, or one that is back."""

    cluster: ClusterState
    new: bool


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A round that is over.

    Attributes
    ----------
    report
        What happened in it.
    request
        What it was planned from.
    seconds
        Wall time of its phases on the server.
    arrivals
        Units that came before it.
    bytes_down
        Bytes sent since the last round that are not of the round: frozen weights, and states that
        were restored.
    """

    report: RoundReport
    request: RoundRequest
    seconds: dict[str, float]
    arrivals: tuple[Arrival, ...] = ()
    bytes_down: int = 0


def dry_run(
    settings: Settings,
    scheduler: Scheduler,
    state: SchedulerState,
    rounds: Iterable[int],
    keep_losses: bool = False,
) -> Iterator[tuple[RoundResult, SchedulerState]]:
    """Decide one round after the other and count what it costs, from a ``state`` on; nothing is
    trained. Yields each round, and the state after it.

    All units finish, with losses that are drawn anew in every round: strategies that look at losses
    choose by chance. With ``keep_losses`` each unit has one loss for all rounds, as where some
    units' rows stay harder than others'. Raises as ``Scheduler.decide``.
    """
    for number in rounds:
        began = time.perf_counter()
        decision = scheduler.decide(state, number)
        plan_s = time.perf_counter() - began
        rng = np.random.default_rng(derive(settings.seed, "losses", 0 if keep_losses else number))
        losses = dict(enumerate(rng.random(settings.federation.num_units).tolist()))
        state, report = scheduler.end(state, decision, Trained(losses), plan_s)
        report = replace(report, units=tuple(each.unit for each in decision.plan.clusters))
        yield RoundResult(report, decision.request, {"plan": plan_s, "round": plan_s}), state
