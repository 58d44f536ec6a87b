"""Decides every round from what units reported, and remembers what the next decision needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from collapipe.config import Settings
from collapipe.devices.presets import ChannelPreset
from collapipe.errors import InfeasibleRoundError
from collapipe.plan import RoundPlan
from collapipe.report import RoundCost, RoundReport
from collapipe.seeds import derive
from collapipe.state import Channel, ClusterState, Estimates, unknown_cluster
from collapipe.wire.messages import Failure
from optim.cost import round_cost
from optim.planner import Planner, RoundRequest
from optim.verify import verify_plan
from server_app.estimates import Sight, estimate
from server_app.world.conditions import EnvironmentState
from server_app.world.environment import Environment

Reported = ClusterState | Failure
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round does, and what it was decided from.

    Attributes
    ----------
    plan
        Without clusters where the round is skipped.
    skipped
        Why it is; None: it is not.
    excluded
        Why units could not be planned with, by unit.
    """

    request: RoundRequest
    plan: RoundPlan
    cost: RoundCost
    skipped: str | None
    excluded: dict[int, str]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All that a round leaves to the next: with it and the seed, decisions repeat.

    Attributes
    ----------
    reported
        What each unit last said of its cluster.
    queues
        Y_n.
    losses
        Of each unit's last round.
    estimates, sight
        What training has shown so far, and what the last round showed.
    clock_s
        Seconds of all rounds, modelled or measured.
    """

    reported: tuple[Reported, ...]
    queues: tuple[float, ...]
    losses: tuple[float | None, ...]
    environment: EnvironmentState
    estimates: Estimates = field(default_factory=Estimates)
    sight: Sight | None = None
    clock_s: float = 0.0


class Scheduler:
    """Round after round: the world as it is now → a request → a verified plan and its cost.

    Draws nothing but from generators of the seed and the round, so that all strategies see the same
    world under the same seed.
    """

    def __init__(self, settings: Settings, reported: Sequence[Reported]) -> None:
        self._settings = settings
        self._planner: Planner = settings.build("strategy")
        self._environment: Environment = settings.build("environment")
        channel: ChannelPreset = settings.build("channel")
        self._channels: tuple[Channel, ...] = channel.draw(self._generator("channels"))
        units, sound = len(reported), tuple(map(self._sound, reported))
        start = self._environment.start(
            _clusters(sound), len(self._channels), self._generator("environment")
        )
        self.state = SchedulerState(sound, (0.0,) * units, (None,) * units, start)

    def decide(self, round_: int) -> Decision:
        """The round's plan, verified; the world moves on.

        Raises ``InfeasibleRoundError`` where there is none and ``federation.on_infeasible`` is
        ``stop``.
        """
        request, skipped = self._request(round_), None
        try:
            plan = self._planner.plan_round(request, self._generator("plan", round_))
        except InfeasibleRoundError as error:
            if self._settings.federation.on_infeasible == "stop":
                raise InfeasibleRoundError(f"round {round_}: {error}") from error
            plan, skipped = RoundPlan(round_, (), queues=error.queues), str(error)
        verify_plan(plan, request)
        excluded = {
            unit: f"{told.kind}: {told.message}"
            for unit, told in enumerate(self.state.reported)
            if isinstance(told, Failure)
        }
        return Decision(request, plan, self._cost(plan, request), skipped, excluded)

    def end(
        self,
        decision: Decision,
        losses: Mapping[int, float],
        reported: Mapping[int, Reported],
        measured_s: float,
        sight: Sight | None = None,
    ) -> None:
        """The round is over: what the units that finished lost and said, and what it showed."""
        modelled = self._settings.federation.clock == "modelled"
        delay_s = decision.cost.delay_s if modelled else measured_s
        before = self.state
        shown = estimate(before.estimates, before.sight, sight) if sight else before.estimates
        self.state = replace(
            before,
            queues=_next_queues(before.queues, decision.plan, losses),
            losses=_updated(before.losses, losses),
            estimates=shown,
            sight=sight or before.sight,
            clock_s=before.clock_s + delay_s,
        )
        self.hear(reported)

    def report(self, decision: Decision) -> RoundReport:
        """The round that ended last, as one in which nobody trained."""
        return RoundReport(
            round=decision.plan.round,
            plan=decision.plan,
            cost=decision.cost,
            clock_s=self.state.clock_s,
            skipped=decision.skipped,
            excluded=decision.excluded,
            queues=self.state.queues,
            units=(),
            failures={},
            train_loss=None,
            estimates=self.state.estimates,
            samples=0,
            target_tokens=0,
            bytes_up=0,
            bytes_down=0,
            seconds={},
        )

    def hear(self, reported: Mapping[int, Reported]) -> None:
        """Units said anew what their clusters are like."""
        sound = {unit: self._sound(told) for unit, told in reported.items()}
        self.state = replace(self.state, reported=_updated(self.state.reported, sound))

    def _sound(self, told: Reported) -> Reported:
        """What a unit said, unless its uplink is none to this run's channels."""
        channels = len(self._channels)
        if isinstance(told, Failure) or told.uplink is None or len(told.uplink.gains) == channels:
            return told
        gains = len(told.uplink.gains)
        return Failure("WireError", f"it tells {gains} gains, and there are {channels} channels")

    def _request(self, round_: int) -> RoundRequest:
        settings, state = self._settings, self.state
        clusters, rng = _clusters(state.reported), self._generator("environment", round_)
        moved = self._environment.step(self._fitting(clusters), rng)
        world = self._environment.world(moved, clusters, self._channels)
        self.state = replace(state, environment=moved)
        return RoundRequest(
            round=round_,
            clusters=world.clusters,
            num_blocks=settings.model.num_blocks,
            batch_size=settings.batch_size,
            local_steps=settings.federation.local_steps,
            num_segments=settings.pipeline.num_segments,
            num_micro_batches=settings.pipeline.num_micro_batches,
            schedule=settings.pipeline.schedule,
            channels=world.channels,
            queues=state.queues,
            losses=state.losses,
            partition=settings.framework.partition,
            learning_rate=settings.optimizer.rate(
                settings.federation.steps_of(round_)[0], settings.federation.total_steps
            ),
            estimates=state.estimates,
        )

    def _fitting(self, clusters: Sequence[ClusterState]) -> EnvironmentState:
        """Conditions of the clusters as they are: one that was unknown, or has other devices than
        it had, begins anew."""
        num_channels, rng = len(self._channels), self._generator("environment")
        fresh = self._environment.start(clusters, num_channels, rng).units
        units = self.state.environment.units
        return EnvironmentState(
            tuple(
                old if len(old.devices) == len(new.devices) else new
                for old, new in zip(units, fresh, strict=True)
            )
        )

    def _cost(self, plan: RoundPlan, request: RoundRequest) -> RoundCost:
        """By the law and the fading that the strategy plans by; one that names none: ``overlap``
        and the gains as they are."""
        strategy = self._settings.tree["strategy"]
        latency, fading = strategy.get("latency", "overlap"), strategy.get("fading", "none")
        return round_cost(plan, request, latency, fading)

    def _generator(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(derive(self._settings.seed, *purpose))


def _clusters(reported: Sequence[Reported]) -> tuple[ClusterState, ...]:
    return tuple(
        told if isinstance(told, ClusterState) else unknown_cluster(unit)
        for unit, told in enumerate(reported)
    )


def _updated(old: Sequence[T], new: Mapping[int, T]) -> tuple[T, ...]:
    return tuple(new.get(unit, value) for unit, value in enumerate(old))


def _next_queues(
    queues: tuple[float, ...], plan: RoundPlan, finished: Collection[int]
) -> tuple[float, ...]:
    """Y_n(t+1): who was scheduled and failed waits on, where the strategy says how; strategies
    without queues change none."""
    if not plan.queues:
        return queues
    waiting = plan.idle_queues or plan.queues
    failed = {cluster.unit for cluster in plan.clusters} - set(finished)
    return tuple(
        waiting[unit] if unit in failed else queue for unit, queue in enumerate(plan.queues)
    )
