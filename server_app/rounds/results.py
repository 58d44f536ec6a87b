"""The results of a round: its report, and the state of the training after it."""

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
from server_app.planning.scheduler import Scheduler, SchedulerState, Trained
from server_app.units import Kept


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of the training after a round; all fields are empty if the run does not train."""

    weights: Tensors = field(default_factory=dict)  # as in ``GlobalModel``
    own_models: dict[int, Tensors] = field(default_factory=dict)  # as in ``GlobalModel``
    server_optimizer: Tensors = field(default_factory=dict)  # the state of the server's optimiser
    heads: dict[int, Tensors] = field(default_factory=dict)  # states of their optimisers, by unit
    # The state that each unit keeps: its optimiser's state and the residual of its compressed
    # uploads. A checkpoint reads them from disk one at a time.
    units: Mapping[int, Kept] = field(default_factory=dict)
    activations: dict[int, Tensors] = field(default_factory=dict)  # the server's memory, by unit
    update_norms: Tensors = field(default_factory=dict)  # the last norms of the units' updates
    privacy: Tensors = field(default_factory=dict)  # the account of ``PrivateMean``


Store = Callable[[int, Kept], bool]
"""Stores a unit's state for a checkpoint; returns whether it accepts the state of more units."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything on which the next round depends, except the configuration and the seed."""

    scheduler: SchedulerState
    training: TrainingState = field(default_factory=TrainingState)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A unit that takes part from this round on. ``new`` is False if the unit has returned."""

    cluster: ClusterState
    new: bool


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A finished round."""

    report: RoundReport
    request: RoundRequest  # the planner's input
    seconds: dict[str, float]  # wall time of the round's phases on the server
    arrivals: tuple[Arrival, ...] = ()  # units that joined or returned before the round
    bytes_down: int = 0  # of frozen weights and restored states that were sent since the last round


def dry_run(
    settings: Settings,
    scheduler: Scheduler,
    state: SchedulerState,
    rounds: Iterable[int],
    keep_losses: bool = False,
) -> Iterator[tuple[RoundResult, SchedulerState]]:
    """Plan ``rounds`` from a ``state`` on and compute their cost without training. Yields each
    round and the state after it.

    All units finish, with losses that are drawn anew in every round, so strategies that use losses
    choose at random. With ``keep_losses`` each unit has the same loss in all rounds, as if some
    units' rows were harder. Raises like ``Scheduler.decide``.
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


class Phases:
    """Measures consecutive phases: each begins when the one before it ends."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds = dict[str, float]()

    def end(self, name: str) -> None:
        """End the current phase and record its seconds as ``name``."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now

    @property
    def total_s(self) -> float:
        """Seconds since the first phase began."""
        return time.perf_counter() - self._began
