"""Plan every round from the units' reports, and keep the state that the next plan needs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from collapipe.config import Settings
from collapipe.config.settings import check_members
from collapipe.errors import InfeasibleRoundError, few_of, unit_called
from collapipe.models.cost import measure_cost
from collapipe.models.stem import StemSpec
from collapipe.plan import ClusterPlan, RoundPlan
from collapipe.report import ClusterReport, RoundCost, RoundingErrors, RoundReport
from collapipe.seeds import derive
from collapipe.state import Channel, ClusterState, Estimates, unknown_cluster
from optim.cost import round_cost, sending_s, stem_seconds, with_stem
from optim.planned import accepted, planned
from optim.planner import Planner, RoundRequest
from optim.problem import LATENCIES, Latency, check_choice
from optim.round.problem import CHOICES
from optim.solvers import CLUSTER_SOLVERS
from server_app.planning.advice import Advice
from server_app.planning.estimates import RoundObservation, estimate
from server_app.planning.kept_plans import next_kept
from server_app.planning.payloads import as_measured, check_chosen, next_rounding
from server_app.planning.queues import next_error_queues, next_queues
from server_app.planning.reported import plannable, same_cluster, with_times
from server_app.roster import Reported, Roster
from server_app.world.environment import Environment, EnvironmentState

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
        self._planner: Planner = settings.planner
        check_members("strategy", self._planner, Planner)
        latency: Latency = getattr(self._planner, "latency", "overlap")
        fading: str = getattr(self._planner, "fading", "none")
        uplink: str = getattr(self._planner, "uplink", "streamed")
        check_choice("strategy.latency", latency, LATENCIES)
        check_choice("strategy.fading", fading, CHOICES["fading"])
        check_choice("strategy.uplink", uplink, CHOICES["uplink"])
        if (partition := settings.framework.partition) is not None:
            check_choice("framework.partition", partition, (*CLUSTER_SOLVERS,))
        self._laws = latency, fading, uplink
        self._advice = Advice(self._planner, latency, self.called)
        self._environment: Environment = settings.build("environment")
        check_members("environment", self._environment, Environment)
        self._channels: tuple[Channel, ...] = settings.channel.draw(self._generator("channels"))

    def begin(self, reported: Sequence[Reported]) -> SchedulerState:
        """Return the state before the first round, from the units' reported clusters."""
        roster = Roster(tuple(self.checked(dict(enumerate(reported))).values()))
        start = self._environment.start(
            roster.clusters, len(self._channels), self._generator("environment")
        )
        return SchedulerState(roster, (0.0,) * len(reported), (None,) * len(reported), start)

    def resumed(self, then: SchedulerState, now: Roster) -> SchedulerState:
        """Return the checkpoint's state ``then`` with the clusters that units report ``now``.

        The log names units whose cluster has changed. Excluded units are asked again in the round
        that the checkpoint has for them. Measured times of real devices are the checkpoint's.
        """
        changed, others = dict[int, ClusterState](), list[str]()
        pairs = zip(then.roster.reported, now.reported, strict=True)
        for unit, (old, new) in enumerate(pairs):
            if isinstance(old, ClusterState) and isinstance(new, ClusterState) and old != new:
                changed[unit] = with_times(new, old)
                if not same_cluster(old, changed[unit]):
                    others.append(self.called(unit))
        if others:
            _log.warning(
                "%s: devices, rows or bits have changed since the checkpoint. The run continues "
                "with the new ones, so its result will differ. To avoid this, restore cluster.file "
                "and the data files and resume again",
                few_of(others, ", "),
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
        check_chosen(plan, self._settings, self.called)
        self._advice.on_sharing(plan, request, self._generator("plan", round_))
        self._advice.on_memory(plan, request)
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
            queues=next_queues(state.queues, decision.plan, finished),
            error_queues=next_error_queues(state.error_queues, decision.plan, finished),
            losses=tuple(losses.get(n, loss) for n, loss in enumerate(state.losses)),
            environment=decision.environment,
            estimates=estimates,
            observation=observation or state.observation,
            clock_s=state.clock_s + (cost.delay_s + kept_s if modelled else measured_s),
            rounding=next_rounding(state.rounding, found, len(state.losses)),
            kept=next_kept(state.kept, decision.plan, decision.request, finished, self.called)
            if self._settings.pipeline.keep_shares
            else (),
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

    def _sending_s(self, decision: RoundDecision, sent: Mapping[int, int]) -> float:
        """Modelled seconds in which the units send these bytes; 0 if the plan has no channels."""
        if all(each.uplink is None for each in decision.plan.clusters):
            return 0.0
        _, fading, _ = self._laws
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
        like = self._settings, len(self._channels)
        return {unit: plannable(each, *like) for unit, each in reported.items()}

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
            replace(each, uplink=as_measured(each.uplink, errors, self._settings.compression))
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
