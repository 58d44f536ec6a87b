"""Plan every round from the units' reports, and keep the state that the next plan needs."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from collapipe.config import Settings
from collapipe.config.settings import check_members
from collapipe.errors import ConfigError, InfeasibleRoundError, few_of, unit_called
from collapipe.formatting import seconds
from collapipe.models.cost import measure_cost
from collapipe.models.stem import StemSpec
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.report import BENCHMARKED, ClusterReport, RoundCost, RoundingErrors, RoundReport
from collapipe.sections import CompressionSettings
from collapipe.seeds import derive
from collapipe.state import Channel, ClusterState, Estimates, Payload, Uplink, unknown_cluster
from collapipe.step_law import interval
from collapipe.wire.compression import FLOAT32
from collapipe.wire.messages import Failure
from optim.cluster_plan import cluster_problem
from optim.cost import round_cost, sending_s, stem_seconds, with_stem
from optim.planned import accepted, planned
from optim.planner import Planner, RoundRequest, present_devices
from optim.problem import FADINGS, LATENCIES, UPLINKS, Latency, check_choice
from optim.sharing.bounds import least_batch_s
from optim.sharing.modes import no_plan
from server_app.roster import Reported, Roster
from server_app.rounds.estimates import RoundObservation, estimate
from server_app.world.environment import Environment, EnvironmentState

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundDecision:
    """A round's plan, its cost and the request it was made from. ``skipped`` and ``excluded`` have
    the meaning they have in ``RoundReport``. ``environment`` is the simulated world in the round;
    the next round starts from it."""

    request: RoundRequest
    plan: RoundPlan
    cost: RoundCost
    skipped: str | None
    excluded: dict[int, str]
    environment: EnvironmentState


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The scheduler's state after a round: with it and the seed, decisions repeat."""

    roster: Roster  # each unit's reported cluster, and the units that are suspended or excluded
    queues: tuple[float, ...]  # Y_n of each unit
    losses: tuple[float | None, ...]  # the last training loss of each unit
    environment: EnvironmentState
    estimates: Estimates = field(default_factory=Estimates)  # of the loss, from all rounds so far
    observation: RoundObservation | None = None  # measurements of the last round
    clock_s: float = 0.0  # of all rounds, modelled or measured
    error_queues: tuple[float, ...] = ()  # Q_n of each unit
    # the last measured rounding errors ρ of each unit's payloads; empty before the first round
    rounding: tuple[RoundingErrors, ...] = ()
    kept: tuple[ClusterPlan, ...] = ()  # of units with real devices, see ``RoundRequest``


@dataclass(frozen=True, slots=True)
class Trained:
    """The scheduler's input after a round: losses and reports of the units that finished it, the
    round's observation, and the bytes that each unit sent for a checkpoint."""

    losses: Mapping[int, float]
    reports: Mapping[int, ClusterReport] = field(default_factory=dict)
    observation: RoundObservation | None = None
    kept_bytes: Mapping[int, int] = field(default_factory=dict)


class Scheduler:
    """Plans a round and updates the state with its results; the state is passed in and returned.

    The simulated world depends only on the seed and the round, so all strategies see the same world
    under the same seed. ``name`` returns a unit's name, or an empty text if it has no name.
    """

    def __init__(self, settings: Settings, name: Callable[[int], str] = lambda unit: "") -> None:
        self._settings, self._name = settings, name
        self._advised, self._compared = set[int](), set[int]()  # units
        self._planner: Planner = settings.planner
        check_members("strategy", self._planner, Planner)
        latency: Latency = getattr(self._planner, "latency", "overlap")
        fading: str = getattr(self._planner, "fading", "none")
        uplink: str = getattr(self._planner, "uplink", "streamed")
        check_choice("strategy.latency", latency, LATENCIES)
        check_choice("strategy.fading", fading, FADINGS)
        check_choice("strategy.uplink", uplink, UPLINKS)
        self._laws = latency, fading, uplink
        self._environment: Environment = settings.build("environment")
        self._channels: tuple[Channel, ...] = settings.channel.draw(self._generator("channels"))

    def begin(self, reported: Sequence[Reported]) -> SchedulerState:
        """Return the state before the first round, from the units' reported clusters."""
        roster = Roster(tuple(map(self._checked, reported)))
        start = self._environment.start(
            roster.clusters, len(self._channels), self._generator("environment")
        )
        return SchedulerState(roster, (0.0,) * len(reported), (None,) * len(reported), start)

    def resumed(self, then: SchedulerState, now: Roster) -> SchedulerState:
        """Return the checkpoint's state ``then`` with the clusters that units report ``now``.

        The log names units whose cluster has changed. Excluded units are asked again in the round
        that the checkpoint has for them. Measured times of real devices are the checkpoint's.
        """
        pairs = zip(then.roster.reported, now.reported, strict=True)
        changed = {
            unit: _with_times(new, old)
            for unit, (old, new) in enumerate(pairs)
            if isinstance(old, ClusterState) and isinstance(new, ClusterState) and old != new
        }
        before = then.roster.reported
        others = [unit for unit, new in changed.items() if not same_cluster(before[unit], new)]
        if others:
            _log.warning(
                "%s: devices, rows or bits have changed since the checkpoint. The run continues "
                "with the new ones, so its result will differ. To avoid this, restore cluster.file "
                "and the data files and resume again",
                few_of(map(self.called, others), ", "),
            )
        return replace(then, roster=then.roster.updated(changed))

    def decide(self, state: SchedulerState, round_: int) -> RoundDecision:
        """Plan the round and verify the plan.

        Raises ``InfeasibleRoundError`` if there is no plan and ``federation.on_infeasible`` is
        ``stop``.
        """
        request, environment = self._request(state, round_)
        skipped = None
        try:
            plan = planned(self._planner, request, self._generator("plan", round_))
        except InfeasibleRoundError as error:
            if self._settings.federation.on_infeasible == "stop":
                raise InfeasibleRoundError(f"round {round_}: {error}") from error
            nothing, skipped = RoundPlan(round_, (), queues=error.queues), str(error)
            plan = accepted(nothing, self._planner, request)
        self._check_chosen(plan)
        self._advise(plan, request)
        self._warn_of_unfit(plan, request)
        if not plan.clusters and skipped is None:
            skipped = "the strategy scheduled no unit"
        left_out = {u: f"{f.kind}: {f.message}" for u, f in state.roster.excluded.items()}
        # the cost follows the same laws as the strategy's plan, see ``Planner``
        cost = round_cost(plan, request, *self._laws)
        excluded = left_out | state.roster.resting(round_)
        return RoundDecision(request, plan, cost, skipped, excluded, environment)

    def end(
        self, state: SchedulerState, decision: RoundDecision, trained: Trained, measured_s: float
    ) -> tuple[SchedulerState, RoundReport]:
        """Return the state after the round, and the scheduler's fields of the round's report.

        With privacy noise the next plans use no loss, gradient norm or rounding error. These depend
        on the units' rows, and a plan decides which units take part; see
        ``collapipe.privacy.accounting``.
        """
        finished, losses, observation = trained.losses.keys(), trained.losses, trained.observation
        stem_rows = {unit: each.stem_rows for unit, each in trained.reports.items()}
        cost = self._with_stem(decision, stem_rows)
        rounding = {unit: each.rounding for unit, each in trained.reports.items()}
        found = {unit: each for unit, each in rounding.items() if each != RoundingErrors()}
        if self._settings.privacy.noise_multiplier:
            losses, observation, found = {}, None, {}
        kept_s, estimates = self._sending_s(decision, trained.kept_bytes), state.estimates
        modelled = self._settings.federation.clock == "modelled"
        if observation is not None:
            estimates = estimate(estimates, state.observation, observation)
        after = replace(
            state,
            queues=_next_queues(state.queues, decision.plan, finished),
            error_queues=_next_error_queues(state.error_queues, decision.plan, finished),
            losses=_updated(state.losses, losses),
            environment=decision.environment,
            estimates=estimates,
            observation=observation or state.observation,
            clock_s=state.clock_s + (cost.delay_s + kept_s if modelled else measured_s),
            rounding=_measured(state, found),
            kept=self._next_kept(state.kept, decision, finished),
        )
        return after, RoundReport(
            round=decision.plan.round,
            plan=decision.plan,
            cost=cost,
            clock_s=after.clock_s,
            skipped=decision.skipped,
            excluded=decision.excluded,
            queues=after.queues,
            error_queues=after.error_queues,
            estimates=after.estimates,
            rounding=found,
            checkpoint_bytes=sum(trained.kept_bytes.values()),
            checkpoint_s=kept_s,
        )

    def _next_kept(
        self, kept: tuple[ClusterPlan, ...], decision: RoundDecision, finished: Collection[int]
    ) -> tuple[ClusterPlan, ...]:
        """Return the plans whose micro-batches and shares stay, with the latest devices of units
        that finished. A device that is missing does not change them: it may come back."""
        if not self._settings.pipeline.keep_shares:
            return ()
        now = {plan.unit: plan for plan in kept}
        states = {state.unit: state for state in decision.request.clusters}
        for plan in decision.plan.clusters:
            state, before = states[plan.unit], now.get(plan.unit)
            same = before is not None and before.order_of_sums == plan.order_of_sums
            away = before and {*before.devices} - {each.name for each in present_devices(state)}
            if state.real_devices and plan.unit in finished and not (same and away):
                now[plan.unit] = plan
                if before and not same:
                    _log.warning(
                        "%s: its plan has other micro-batches or shares than in earlier rounds, "
                        "so that the weights' last bits differ",
                        self.called(plan.unit),
                    )
        return tuple(now.values())

    def _sending_s(self, decision: RoundDecision, sent: Mapping[int, int]) -> float:
        """Modelled seconds in which the units send these bytes; 0 if the plan has no channels."""
        if all(each.uplink is None for each in decision.plan.clusters):
            return 0.0
        fading: str = getattr(self._planner, "fading", "none")
        bits = {unit: 8.0 * each for unit, each in sent.items()}
        return sending_s(bits, decision.request, fading)

    def _with_stem(self, decision: RoundDecision, rows: Mapping[int, int]) -> RoundCost:
        """Add the computation of the units' frozen stems to the round's cost."""
        settings, spec = self._settings, self._settings.model
        if not isinstance(spec, StemSpec) or not rows:
            return decision.cost
        tokens = settings.task.max_length
        block = measure_cost(spec, tokens, settings.batch_size, settings.optimizer)
        share = block.forward_share
        if settings.recomputes:  # the devices' laws include another forward pass
            share /= 1 + share
        states = {state.unit: state for state in decision.request.clusters}
        blocks = spec.frozen_blocks
        seconds = {u: stem_seconds(states[u], blocks, share, count) for u, count in rows.items()}
        return with_stem(decision.cost, seconds)

    def called(self, unit: int) -> str:
        """Return the unit's name or number for messages."""
        return unit_called(unit, self._name(unit))

    def checked(self, reported: Mapping[int, Reported]) -> dict[int, Reported]:
        """Replace reported clusters that this run cannot plan by failures."""
        return {unit: self._checked(each) for unit, each in reported.items()}

    def _check_chosen(self, plan: RoundPlan) -> None:
        """Raise ``ConfigError`` if the strategy left precisions or heads' places open."""
        settings = self._settings
        open_ = ", ".join(each for each in self._of_payloads if each.endswith("=auto"))
        for cluster in plan.clusters:
            chosen = cluster.uplink and cluster.uplink.activation
            if settings.chooses_payloads and not chosen:
                raise ConfigError(
                    f"{open_}: the strategy chose nothing for "
                    f"{self.called(cluster.unit)}; set these options, or use a strategy that "
                    "chooses them: dssra with solver=exact, or all with as many channels as units"
                )

    def _advise(self, plan: RoundPlan, request: RoundRequest) -> None:
        """Log once for each unit that keeps single devices if shared stages are planned to be
        faster by more than the prediction's error."""
        single = {each.unit for each in request.kept if not each.shares} - self._advised
        steps = {c.unit: c.step for c in request.clusters if c.unit in single and c.step}
        if not steps:
            return
        self._advised |= steps.keys()
        now_s = {each.unit: each.latency_s or 0.0 for each in plan.clusters}
        with suppress(InfeasibleRoundError):
            rng, free = self._generator("plan", request.round), replace(request, kept=())
            shared = (each for each in self._planner.plan_round(free, rng).clusters if each.shares)
            for each in shared:
                step, shared_s = steps.get(each.unit), each.latency_s or math.inf
                if step and shared_s < interval(now_s.get(each.unit, 0.0), step.spread)[0]:
                    _log.warning(
                        "%s: with shared stages its devices would take about %s instead of %s a "
                        "round; a run begins with them if its steps were measured before: "
                        "collapipe device measure FILE OPTIONS --write",
                        *(self.called(each.unit), seconds(shared_s), seconds(now_s[each.unit])),
                    )

    def _warn_of_unfit(self, plan: RoundPlan, request: RoundRequest) -> None:
        """Log once for each unit whose devices cannot hold the model, because no round plans it.

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
        problem = cluster_problem(request, cluster, self._laws[0])
        if math.isinf(least_batch_s(problem)):
            _log.warning(
                "%s: no round can plan it: %s", self.called(cluster.unit), no_plan(problem)
            )

    @property
    def _of_payloads(self) -> tuple[str, ...]:
        """The options that determine the units' payloads, as text."""
        compression, decoder = self._settings.compression, self._settings.decoder
        return (
            f"compression.activation={compression.activation}",
            f"compression.upload={compression.upload}",
            f"decoder.mode={decoder.mode}",
        )

    def _checked(self, reported: Reported) -> Reported:
        """Return the cluster without its name, because a unit may report any name. Return a failure
        if its uplink has not this run's number of channels or offers other payloads."""
        if isinstance(reported, Failure):
            return reported
        step = reported.step if reported.real_devices else None
        reported = replace(reported, name="", step=step)
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
                f"{', '.join(self._of_payloads)}",
            )
        return reported

    def _allows(self, payload: Payload) -> bool:
        """Whether the options allow the payload's precisions and the place of its head."""
        settings, compression = self._settings, self._settings.compression
        places = ("server", "control_unit") if settings.chooses_heads else (None,)
        sends = settings.server_has_heads and payload.head != "control_unit"
        activation = compression.activation if sends else FLOAT32
        return (
            payload.head in places
            and compression.upload in (payload.upload, "auto")
            and activation in (payload.activation, "auto")
        )

    def _request(self, state: SchedulerState, round_: int) -> tuple[RoundRequest, EnvironmentState]:
        """Return the planner's input for the round, and the simulated world in it."""
        settings, clusters = self._settings, self._known_clusters(state)
        before = self._fitting(state.environment, clusters)
        environment = self._environment.step(before, self._generator("environment", round_))
        now = self._environment.conditions(environment, clusters)
        resting = state.roster.resting(round_)
        request = RoundRequest(
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
            kept=state.kept,
        )
        return request, environment

    def _known_clusters(self, state: SchedulerState) -> tuple[ClusterState, ...]:
        """The reported clusters with their names, and with the measured ρ of their payloads."""
        reported = state.roster.clusters
        clusters = tuple(replace(each, name=self._name(each.unit)) for each in reported)
        if not state.rounding:
            return clusters
        pairs = zip(clusters, state.rounding, strict=True)
        return tuple(
            replace(each, uplink=_as_measured(each.uplink, errors, self._settings.compression))
            for each, errors in pairs
        )

    def _fitting(
        self, before: EnvironmentState, clusters: Sequence[ClusterState]
    ) -> EnvironmentState:
        """Return the world's conditions; clusters with another number of devices get new ones."""
        rng = self._generator("environment")
        fresh = self._environment.start(clusters, len(self._channels), rng).units
        pairs = zip(before.units, fresh, strict=True)
        return EnvironmentState(
            tuple(old if len(old.devices) == len(new.devices) else new for old, new in pairs)
        )

    def _generator(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(derive(self._settings.seed, *purpose))


def _measured(
    state: SchedulerState, found: Mapping[int, RoundingErrors]
) -> tuple[RoundingErrors, ...]:
    """Update the measured ρ of each unit's payloads with the values ``found`` in a round."""
    if not found:
        return state.rounding
    before = state.rounding or (BENCHMARKED,) * len(state.losses)
    return _updated(before, {unit: before[unit].updated(each) for unit, each in found.items()})


def _as_measured(
    uplink: Uplink | None, errors: RoundingErrors, compression: CompressionSettings
) -> Uplink | None:
    """Set the payloads' gradient errors from ``errors``, and sort the payloads by it."""
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
    """Return Y_n(t+1). A scheduled unit that failed gets the queue of an idle unit if the plan has
    ``idle_queues``. A plan without queues changes nothing."""
    if not plan.queues:
        return queues
    waiting = plan.idle_queues or plan.queues
    failed = {cluster.unit for cluster in plan.clusters} - set(finished)
    return _updated(plan.queues, {unit: waiting[unit] for unit in failed})


def _next_error_queues(
    queues: tuple[float, ...], plan: RoundPlan, finished: Collection[int]
) -> tuple[float, ...]:
    """Return Q_n(t+1). The queue of a scheduled unit that failed shrinks by 1, down to 0; in a
    skipped round this holds for every unit. A plan without error queues changes nothing."""
    before = queues or (0.0,) * len(plan.error_queues)
    spared = tuple(max(queue - 1.0, 0.0) for queue in before)
    if not plan.error_queues:
        return queues if plan.clusters else spared
    failed = {cluster.unit for cluster in plan.clusters} - set(finished)
    return _updated(plan.error_queues, {unit: spared[unit] for unit in failed})


def _with_times(cluster: ClusterState, then: ClusterState) -> ClusterState:
    """Return a cluster of real devices with the measured times that it had ``then``."""
    if not (cluster.real_devices and then.real_devices):
        return cluster
    times = {device.name: device.time for device in then.devices}
    devices = (replace(each, time=times.get(each.name, each.time)) for each in cluster.devices)
    return replace(cluster, devices=tuple(devices), step=then.step)


def same_cluster(then: Reported, now: Reported) -> bool:
    """Whether a unit's cluster has not changed. Real devices are compared by their names, because
    their speeds and free memory are measured anew."""
    if isinstance(then, Failure) or isinstance(now, Failure):
        return False
    names = [[device.name for device in each.devices] for each in (then, now)]
    if then.real_devices and names[0] == names[1]:
        now = replace(now, devices=then.devices, step=then.step)
    return then == now
