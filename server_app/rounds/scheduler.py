"""Decides every round from what units reported, and remembers what the next decision needs."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from collapipe.config import Settings
from collapipe.config.settings import check_members
from collapipe.errors import ConfigError, InfeasibleRoundError, few_of, unit_called
from collapipe.models.cost import measure_cost
from collapipe.models.stem import StemSpec
from collapipe.plan import RoundPlan
from collapipe.report import ClusterReport, RoundCost, RoundReport
from collapipe.rounding import BENCHMARKED, RoundingErrors
from collapipe.sections import CompressionSettings
from collapipe.seeds import derive
from collapipe.state import (
    Channel,
    ClusterState,
    Estimates,
    Payload,
    Uplink,
    unknown_cluster,
)
from collapipe.wire.compression import FLOAT32
from collapipe.wire.messages import Failure
from optim.cost import round_cost, sending_s, stem_seconds, with_stem
from optim.planner import Planner, RoundRequest
from optim.problem import Latency
from optim.radio.channel import Fading
from optim.verify import verify_plan
from server_app.rounds.estimates import RoundObservation, estimate
from server_app.rounds.failed_units import FailedUnits
from server_app.world.environment import Environment, EnvironmentState

Reported = ClusterState | Failure
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """What a round does, and what it was decided from; see ``RoundReport`` for ``skipped`` and
    ``excluded``."""

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
        Y_n; ``error_queues``: Q_n.
    observation
        What the last round showed; ``estimates``: what training has shown so far.
    clock_s
        Of all rounds, modelled or measured.
    rounding
        ρ of what each unit sends, as it measured it last; empty before the first round.
    failed
        Units that failed their last rounds although they were there.
    """

    reported: tuple[Reported, ...]
    queues: tuple[float, ...]
    losses: tuple[float | None, ...]
    environment: EnvironmentState
    estimates: Estimates = field(default_factory=Estimates)
    observation: RoundObservation | None = None
    clock_s: float = 0.0
    error_queues: tuple[float, ...] = ()
    rounding: tuple[RoundingErrors, ...] = ()
    failed: FailedUnits = field(default_factory=FailedUnits)


class Scheduler:
    """Round after round: the world as it is now → a request → a verified plan and its cost.

    Draws the world from generators of the seed and the round alone, so that all strategies see the
    same one under the same seed. ``name`` returns a unit's name, or an empty text if it has none.
    """

    def __init__(
        self,
        settings: Settings,
        reported: Sequence[Reported],
        name: Callable[[int], str] = lambda unit: "",
    ) -> None:
        self._settings, self._name = settings, name
        self._planner: Planner = settings.planner
        check_members("strategy", self._planner, Planner)
        self._environment: Environment = settings.build("environment")
        self._channels: tuple[Channel, ...] = settings.channel.draw(self._generator("channels"))
        units, checked = len(reported), tuple(map(self._checked, reported))
        start = self._environment.start(
            _clusters(checked), len(self._channels), self._generator("environment")
        )
        self.state = SchedulerState(checked, (0.0,) * units, (None,) * units, start)

    def resume_from(self, state: SchedulerState) -> None:
        """Go on from a checkpoint's state, with the units' clusters as they are now; the log names
        units whose cluster is another one."""
        pairs = [*zip(state.reported, self.state.reported, strict=True)]
        changed = {
            unit: now
            for unit, (then, now) in enumerate(pairs)
            if isinstance(then, ClusterState) and isinstance(now, ClusterState) and then != now
        }
        others = [unit for unit in changed if not same_cluster(*pairs[unit])]
        if others:
            _log.warning(
                "%s: other devices, rows or bits than at the checkpoint: the run goes on with "
                "these, and will not end as it would have; or bring back the files that it began "
                "with (cluster.file and the data's) and resume again",
                few_of(map(self._called, others), ", "),
            )
        self.state = replace(state, reported=_updated(state.reported, changed))

    def decide(self, round_: int) -> RoundDecision:
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
        if not isinstance(plan, RoundPlan):
            raise ConfigError(
                f"strategy: {type(self._planner).__qualname__}.plan_round returned a "
                f"{type(plan).__name__}, expected a RoundPlan"
            )
        verify_plan(plan, request)
        self._check_chosen(plan)
        excluded = {unit: f"{f.kind}: {f.message}" for unit, f in self.excluded.items()}
        excluded |= self._resting(round_)
        # by the laws that the strategy plans by, see ``Planner``
        latency: Latency = getattr(self._planner, "latency", "overlap")
        fading: Fading = getattr(self._planner, "fading", "none")
        uplink: str = getattr(self._planner, "uplink", "streamed")
        cost = round_cost(plan, request, latency, fading, uplink)
        return RoundDecision(request, plan, cost, skipped, excluded)

    @property
    def excluded(self) -> dict[int, Failure]:
        """Units that cannot be planned with, and why."""
        reported = enumerate(self.state.reported)
        return {unit: told for unit, told in reported if isinstance(told, Failure)}

    @property
    def clusters(self) -> tuple[ClusterState, ...]:
        """What each unit last said of its cluster, be it that nothing is known."""
        return _clusters(self.state.reported)

    def note_failures(
        self, round_: int, failures: Mapping[int, Failure], finished: Collection[int]
    ) -> None:
        """Who failed a round may have to rest from the next ones. Raises what ends the run where no
        unit is left, see ``FailedUnits``."""
        failed = self.state.failed.after(round_, failures, finished)
        self.state = replace(self.state, failed=failed)
        if not finished:
            failed.check(round_, self._present, self._called)

    def _called(self, unit: int) -> str:
        return unit_called(unit, self._name(unit))

    @property
    def _present(self) -> set[int]:
        """Units that can be planned with."""
        return {*range(len(self.state.reported))} - self.excluded.keys()

    def _resting(self, round_: int) -> dict[int, str]:
        return self.state.failed.resting(round_, self._present)

    def end(
        self,
        decision: RoundDecision,
        losses: Mapping[int, float],
        kept_bytes: Mapping[int, int],
        measured_s: float,
        observation: RoundObservation | None = None,
        reports: Mapping[int, ClusterReport] | None = None,
        **trained: Any,
    ) -> RoundReport:
        """The round is over: losses and reports of the units that finished, bytes that each unit
        sent for its checkpoint, and what the round showed. ``trained`` are the report's fields that
        training gives.

        With noise the next plans get no loss, gradient norm or rounding error: these depend on
        rows, and a plan decides which units take part, see ``collapipe.privacy.accounting``.
        """
        reports, finished = reports or {}, losses.keys()
        stem_rows = {unit: each.stem_rows for unit, each in reports.items()}
        decision = replace(decision, cost=self._with_stem(decision, stem_rows))
        told = {unit: each.rounding for unit, each in reports.items()}
        found = {unit: each for unit, each in told.items() if each != RoundingErrors()}
        if self._settings.privacy.noise_multiplier:
            losses, observation, found = {}, None, {}
        modelled, before = self._settings.federation.clock == "modelled", self.state
        kept_s, estimates = self._sending_s(decision, kept_bytes), before.estimates
        delay_s = decision.cost.delay_s + kept_s if modelled else measured_s
        if observation is not None:
            estimates = estimate(estimates, before.observation, observation)
        self.state = replace(
            before,
            queues=_next_queues(before.queues, decision.plan, finished),
            error_queues=_next_error_queues(before.error_queues, decision.plan, finished),
            losses=_updated(before.losses, losses),
            estimates=estimates,
            observation=observation or before.observation,
            clock_s=before.clock_s + delay_s,
            rounding=self._measured(found),
        )
        return RoundReport(
            round=decision.plan.round,
            plan=decision.plan,
            cost=decision.cost,
            clock_s=self.state.clock_s,
            skipped=decision.skipped,
            excluded=decision.excluded,
            queues=self.state.queues,
            error_queues=self.state.error_queues,
            estimates=self.state.estimates,
            rounding=found,
            checkpoint_bytes=sum(kept_bytes.values()),
            checkpoint_s=kept_s,
            **trained,
        )

    def _sending_s(self, decision: RoundDecision, sent: Mapping[int, int]) -> float:
        """Modelled seconds of so many bytes of each unit, if the round's plan has channels."""
        if all(each.uplink is None for each in decision.plan.clusters):
            return 0.0
        fading: Fading = getattr(self._planner, "fading", "none")
        bits = {unit: 8.0 * each for unit, each in sent.items()}
        return sending_s(bits, decision.request, fading)

    def _with_stem(self, decision: RoundDecision, rows: Mapping[int, int]) -> RoundCost:
        """The round's cost, with what the units' frozen stems computed."""
        settings, spec = self._settings, self._settings.model
        if not isinstance(spec, StemSpec) or not rows:
            return decision.cost
        tokens = settings.task.max_length
        block = measure_cost(spec, tokens, settings.batch_size, settings.optimizer)
        share = block.forward_share
        if settings.recomputes:  # the devices' laws have a forward more
            share /= 1 + share
        states = {state.unit: state for state in decision.request.clusters}
        blocks = spec.frozen_blocks
        seconds = {u: stem_seconds(states[u], blocks, share, count) for u, count in rows.items()}
        return with_stem(decision.cost, seconds)

    def update_states(self, reported: Mapping[int, Reported]) -> None:
        """What units report of their clusters replaces what they reported before."""
        checked = {unit: self._checked(told) for unit, told in reported.items()}
        self.state = replace(self.state, reported=_updated(self.state.reported, checked))

    def _check_chosen(self, plan: RoundPlan) -> None:
        """Raise ``ConfigError`` where the strategy was to choose precisions, or where heads train,
        and did not."""
        settings = self._settings
        for cluster in plan.clusters:
            chosen = cluster.uplink and cluster.uplink.activation
            if settings.chooses_payloads and not chosen:
                raise ConfigError(
                    f"{self._left_open}: the strategy chose nothing for "
                    f"{self._called(cluster.unit)}; set them, or take a strategy that does: dssra "
                    "with solver=exact, or all with as many channels as units"
                )

    @property
    def _left_open(self) -> str:
        """The options of what units send."""
        compression, decoder = self._settings.compression, self._settings.decoder
        return (
            f"compression.activation={compression.activation}, "
            f"compression.upload={compression.upload}, decoder.mode={decoder.mode}"
        )

    def _checked(self, reported: Reported) -> Reported:
        """The cluster without a name, for the unit may report any; a failure in its place if its
        uplink has other channels than this run, or offers other payloads."""
        if isinstance(reported, Failure):
            return reported
        reported = replace(reported, name="")
        if reported.uplink is None:
            return reported
        gains, expected = len(reported.uplink.gains), len(self._channels)
        if gains != expected:
            return Failure("WireError", f"reported {gains} channel gains, expected {expected}")
        offered = reported.uplink.payloads
        if self._settings.chooses_payloads != bool(offered) or not all(map(self._allows, offered)):
            names = ", ".join("/".join(map(str, each.choice)) for each in offered[:3])
            return Failure(
                "WireError",
                f"offers activations, uploads and heads {names or 'without a choice'}, expected "
                f"{self._left_open}",
            )
        return reported

    def _allows(self, payload: Payload) -> bool:
        """Whether its precisions, and the place of its head, are set or left to the scheduler."""
        settings, compression = self._settings, self._settings.compression
        places = ("server", "control_unit") if settings.chooses_heads else (None,)
        sends = settings.server_has_heads and payload.head != "control_unit"
        activation = compression.activation if sends else FLOAT32
        return (
            payload.head in places
            and compression.upload in (payload.upload, "auto")
            and activation in (payload.activation, "auto")
        )

    def _request(self, round_: int) -> RoundRequest:
        settings, state = self._settings, self.state
        clusters, rng = self._known_clusters(), self._generator("environment", round_)
        moved, resting = self._environment.step(self._fitting(clusters), rng), self._resting(round_)
        self.state = replace(state, environment=moved)
        now = self._environment.conditions(moved, clusters)
        return RoundRequest(
            round=round_,
            clusters=tuple(
                unknown_cluster(c.unit, c.name) if c.unit in resting else c for c in now
            ),
            num_blocks=settings.model.num_blocks,
            batch_size=settings.batch_size,
            local_steps=settings.federation.local_steps,
            num_segments=settings.pipeline.num_segments,
            num_micro_batches=settings.pipeline.num_micro_batches,
            schedule=settings.pipeline.schedule,
            channels=self._channels,
            queues=state.queues,
            losses=state.losses,
            partition=settings.framework.partition,
            learning_rate=settings.optimizer.rate(
                settings.federation.steps_of(round_)[0], settings.federation.total_steps
            ),
            estimates=state.estimates,
            error_queues=state.error_queues,
        )

    def _measured(self, found: Mapping[int, RoundingErrors]) -> tuple[RoundingErrors, ...]:
        """ρ of what each unit sends, after units have ``found`` it anew."""
        if not found:
            return self.state.rounding
        before = self.state.rounding or (BENCHMARKED,) * len(self.state.reported)
        return _updated(before, {unit: before[unit].updated(each) for unit, each in found.items()})

    def _known_clusters(self) -> tuple[ClusterState, ...]:
        """As units reported them, with their names, and with ρ of their payloads as measured."""
        reported = _clusters(self.state.reported)
        clusters = tuple(replace(each, name=self._name(each.unit)) for each in reported)
        if not self.state.rounding:
            return clusters
        pairs = zip(clusters, self.state.rounding, strict=True)
        return tuple(
            replace(each, uplink=_as_measured(each.uplink, errors, self._settings.compression))
            for each, errors in pairs
        )

    def _fitting(self, clusters: Sequence[ClusterState]) -> EnvironmentState:
        """Conditions of the clusters as they are: one that was unknown, or has other devices than
        it had, begins anew."""
        rng, before = self._generator("environment"), self.state.environment.units
        fresh = self._environment.start(clusters, len(self._channels), rng).units
        pairs = zip(before, fresh, strict=True)
        return EnvironmentState(
            tuple(old if len(old.devices) == len(new.devices) else new for old, new in pairs)
        )

    def _generator(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(derive(self._settings.seed, *purpose))


def _clusters(reported: Sequence[Reported]) -> tuple[ClusterState, ...]:
    return tuple(
        told if isinstance(told, ClusterState) else unknown_cluster(unit)
        for unit, told in enumerate(reported)
    )


def _as_measured(
    uplink: Uplink | None, errors: RoundingErrors, compression: CompressionSettings
) -> Uplink | None:
    """With these errors of the payloads, those with the least first."""
    if uplink is None:
        return None
    payloads = [
        replace(p, gradient_error=compression.rounding_error(p.activation, p.upload, errors))
        for p in uplink.payloads
    ]
    payloads.sort(key=lambda each: each.gradient_error)
    return replace(uplink, payloads=tuple(payloads))


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
    return _updated(plan.queues, {unit: waiting[unit] for unit in failed})


def _next_error_queues(
    queues: tuple[float, ...], plan: RoundPlan, finished: Collection[int]
) -> tuple[float, ...]:
    """Q_n(t+1): who was scheduled and failed sent nothing that counts, and in a round that is
    skipped nobody did; strategies without queues change none."""
    before = queues or (0.0,) * len(plan.error_queues)
    spared = tuple(max(queue - 1.0, 0.0) for queue in before)
    if not plan.error_queues:
        return queues if plan.clusters else spared
    failed = {cluster.unit for cluster in plan.clusters} - set(finished)
    return _updated(plan.error_queues, {unit: spared[unit] for unit in failed})


def same_cluster(then: Reported, now: Reported) -> bool:
    """Whether a unit's cluster is the one that it was: real devices by their names, since their
    speeds and free memory are measured anew."""
    if isinstance(then, Failure) or isinstance(now, Failure):
        return False
    names = [[device.name for device in each.devices] for each in (then, now)]
    if then.real_devices and names[0] == names[1]:
        now = replace(now, devices=then.devices)
    return then == now
