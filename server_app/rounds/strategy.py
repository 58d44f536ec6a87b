"""The round as a Flower strategy: plan, send, collect, aggregate. Decides nothing by itself."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from collapipe.config import Settings
from collapipe.deployment.server_folder import own_folder
from collapipe.models.split import frozen_names
from collapipe.plan import ClusterPlan
from collapipe.privacy.clipping import update_norm, weights_norm
from collapipe.report import ClusterReport, RoundReport, UnitsEvaluation
from collapipe.runs.model import initial_model
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Tensors, chosen
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.feedback import ActivationMemory
from collapipe.wire.messages import Failure, LinkAddress, Split, TrainReply, TrainRequest
from server_app.attendance import SILENT
from server_app.decoding.decoder import OnStep
from server_app.decoding.heads import Heads
from server_app.decoding.link import DecoderLinkServer
from server_app.places import Places
from server_app.reply_limit import expect
from server_app.rounds.estimates import observed
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.kept import check_kept, most_kept
from server_app.rounds.private_mean import ClippedSum, PrivateMean
from server_app.rounds.replies import question_of, received, trained
from server_app.rounds.results import RoundResult, Store, TrainingState
from server_app.rounds.scheduler import RoundDecision, Scheduler, SchedulerState
from server_app.rounds.screening import BELIEVED, UpdateScreen, capped
from server_app.rounds.secure_sum import SecureSum
from server_app.rounds.totals import totals
from server_app.rounds.units_evaluation import evaluate_on_units
from server_app.units import Kept, Units


@dataclass(frozen=True, slots=True)
class _Round:
    """What is open between sending a round's messages and aggregating their replies: what each unit
    of the plan got, weights and a head's optimiser memory, and ``time.perf_counter`` at the begin,
    after the decision, and when all messages were made; ``masked`` where updates are."""

    decision: RoundDecision
    sent: dict[int, Tensors]
    head_states: dict[int, Tensors]
    began: float
    planned: float
    left: float
    masked: SecureSum | None = None

    def skipped_for(self, why: str | None) -> Self:
        """The same, with a cause why it came to nothing."""
        return replace(self, decision=replace(self.decision, skipped=why))


OnArrival = Callable[[int, ClusterState, bool], None]  # of a round, and whether the unit is new


class CollaPipeStrategy(Strategy):
    """A Flower strategy whose units pipeline encoders while the server trains the head.

    ``start`` is all that a ServerApp needs::

        settings = config.load(context.run_config)
        told = Units(grid, settings.federation).rows()
        strategy = CollaPipeStrategy(settings, make_tokenizer(settings, told.values()))
        strategy.start(grid=grid, initial_arrays=strategy.initial_arrays(), num_rounds=3)

    ``arrays`` of all methods is the whole model: embedding, blocks and head. Where the server has
    no heads, units get and train all of it. Where the framework does not aggregate, each unit goes
    on with a model of its own, and ``arrays`` is where all began.

    ``on_round`` is called after every round, ``on_step`` by the decoder link's threads after every
    local step, ``on_account`` with the rounds that ε counts of each unit, before anybody sees what
    came of the last one; ``on_arrival`` before a round with each unit that joins it, be it back or
    new. ``places`` are those of units that the run knows by name already. ``on_checkpoint`` is
    called with each round's number before its report is made, and returns what stores the units'
    states; None if the round has no checkpoint.
    """

    _units: Units  # of the last ``start``
    _scheduler: Scheduler
    _heads: Heads  # while ``start`` runs
    _round: _Round  # from ``configure_train`` to ``aggregate_train``

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        on_round: Callable[[RoundResult], None] = lambda result: None,
        on_step: OnStep = lambda unit, step, loss, samples: None,
        places: Places | None = None,
        on_account: Callable[[Mapping[int, int]], None] = lambda rounds: None,
        on_checkpoint: Callable[[int], Store | None] = lambda round_: None,
        on_arrival: OnArrival = lambda round_, state, new: None,
    ) -> None:
        self._settings, self._on_round, self._on_step = settings, on_round, on_step
        self._on_account, self._on_checkpoint = on_account, on_checkpoint
        self._on_arrival = on_arrival
        self._tokenizer, self._places = tokenizer, places or Places()
        frozen = frozen_names(settings.model, tokenizer.vocabulary)
        self.model = GlobalModel(settings, frozen)
        self._screen = UpdateScreen(settings.federation.max_update_norm)
        self._private: PrivateMean | None = None
        if (clip_norm := settings.privacy.clip_norm) is not None:
            self._private = PrivateMean(settings.privacy, clip_norm)
        self._arrays: ArrayRecord | None = None  # what the model's weights came from
        self._rounds_done = 0
        self._checkpoint: tuple[SchedulerState, TrainingState] | None = None

    def initial_arrays(self) -> ArrayRecord:
        """The untrained model, or that of the checkpoint that the run goes on from."""
        if self._checkpoint is None:
            first = initial_model(self._settings, self._tokenizer).state_dict()
            self.model.weights = {name: tensor.detach() for name, tensor in first.items()}
        self._arrays = ArrayRecord(self.model.weights)
        return self._arrays

    def resume_from(
        self,
        round_: int,
        scheduler: SchedulerState,
        training: TrainingState,
        account: Mapping[int, int],
    ) -> None:
        """Let ``start`` go on after ``round_``: its first round is the next one. ``account`` as
        ``on_account`` was told it, of rounds after that one, too."""
        self._rounds_done, self._checkpoint = round_, (scheduler, training)
        self.model.weights, self.model.own_models = training.weights, dict(training.own_models)
        self.model.server_optimizer.state = training.server_optimizer
        self._screen.past = dict(training.update_norms)
        if self._private is not None and training.privacy:
            self._private.restore(training.privacy, account)

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far; None without noise."""
        return self._private.epsilon if self._private else None

    def summary(self) -> None:
        """Nothing: the run's configuration is printed and saved by who starts it."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        *arguments: Any,
        **named: Any,
    ) -> Result:
        """As ``Strategy.start``; ``timeout`` is ``federation.round_timeout_s`` unless given.

        Raises ``ConfigError`` or ``RoundFailedError`` where the nodes are not the run's units or
        none of them finished (see ``FailedUnits``), ``InfeasibleRoundError`` where a round has no
        plan and ``federation.on_infeasible`` is ``stop``, ``NonFiniteLossError`` where all units'
        training diverged or the model did, ``StorageError`` where no unit has room for what it
        keeps, ``BudgetSpentError`` where a further round would exceed ``privacy.max_epsilon``.
        """
        settings, num_units = self._settings, self._settings.federation.num_units
        timeout_s = settings.federation.round_timeout_s if timeout is None else timeout
        self._load(initial_arrays)
        frozen, vocabulary = self.model.frozen_parts(), self._tokenizer.vocabulary
        packed = self._tokenizer.pack()
        self._units = Units(grid, settings.federation, packed, frozen, self._places)
        self._scheduler = Scheduler(settings, self._units.discover(), self._places.name)
        linked = settings.server_has_heads
        server = own_folder()
        certified = server.identity() if linked and server else None
        made = DecoderLinkServer(settings.link, num_units, certified) if linked else nullcontext()
        with made as link:
            self._heads = Heads(settings, vocabulary, link, self._on_step, self.model.frozen)
            if self._checkpoint is not None:
                self._restore(*self._checkpoint)
            try:
                return super().start(
                    grid, initial_arrays, num_rounds, timeout_s, *arguments, **named
                )
            finally:
                del self._heads  # and their optimisers' memory

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A ``train`` message for each unit of the round's plan; none where it is skipped."""
        round_, excluded = self._rounds_done + server_round, self._scheduler.excluded
        # They may be in order by now, and others may have come.
        known = {*self._units.nodes}
        arrived = self._units.ask_again(round_, excluded)
        self._scheduler.update_states(arrived)
        for unit, answer in arrived.items():
            if isinstance(answer, ClusterState):
                self._on_arrival(round_, answer, unit not in known)
        began = time.perf_counter()
        decision = self._scheduler.decide(round_)
        planned = time.perf_counter()
        self._load(arrays)
        plan, heads = decision.plan, self._heads
        if self._private is not None and plan.clusters:
            self._private.check([each.unit for each in plan.clusters], self._places.called)
        models = {each.unit: self.model.of_unit(each.unit) for each in plan.clusters}
        num_rows = {each.unit: each.num_samples for each in decision.request.clusters}
        links = heads.open(round_, models, plan.clusters, num_rows)
        masked = self._masked(round_, [*models])
        has_head = {each.unit: self._settings.unit_has_head(each.uplink) for each in plan.clusters}
        sent = {u: chosen(models[u], self.model.names(has)) for u, has in has_head.items()}
        states = {u: heads.states.get(u, {}) if has else {} for u, has in has_head.items()}
        alike = {has: unit for unit, has in has_head.items() if unit not in self.model.own_models}
        common = {has: records.pack_tensors(sent[unit]) for has, unit in alike.items()}
        messages = list[Message]()
        for each in plan.clusters:
            unit = each.unit
            if masked is not None and unit not in masked.requests:
                continue  # it has failed, or the round is over
            own = unit in self.model.own_models
            weights = records.pack_tensors(sent[unit]) if own else common[has_head[unit]]
            state = records.pack_head_state(states[unit])
            content = records.pack(self._request(round_, each, links), weights=weights, **state)
            content.update(masked.requests[unit] if masked else {})
            node = self._units.nodes[unit]
            messages.append(Message(content, node, records.TRAIN, group_id=str(round_)))
        expect(self._largest(decision, sent, masked))
        left = time.perf_counter()
        self._round = _Round(decision, sent, states, began, planned, left, masked)
        return messages

    def _largest(
        self, decision: RoundDecision, sent: Mapping[int, Tensors], masked: SecureSum | None
    ) -> int:
        """Bytes of the round's largest reply."""
        return max(
            (
                question_of(
                    each,
                    decision.request,
                    sent[each.unit],
                    self._settings,
                    masked.expected(sent[each.unit]) if masked else None,
                ).size.total_bytes
                for each in decision.plan.clusters
                if masked is None or each.unit in masked.requests
            ),
            default=0,
        )

    def _masked(self, round_: int, planned: Sequence[int]) -> SecureSum | None:
        """The round's masked sum, for which units have made keys; None: updates travel plain."""
        if not (self._settings.privacy.secure_aggregation and planned):
            return None
        how = self._settings, self._units
        masked = SecureSum(*how, round_, planned, self._clip_norm, self._before_sum)
        masked.open()
        return masked

    def _request(
        self, round_: int, plan: ClusterPlan, links: Mapping[int, LinkAddress]
    ) -> TrainRequest:
        """What a unit is asked for, beside its weights."""
        unit, timeout_s = plan.unit, self._settings.federation.round_timeout_s
        last, arrived = self._heads.remembered(unit).round, self._units.arrived.get(unit, 0)
        link, clip_norm = links.get(unit), self._clip_norm
        return TrainRequest(round_, plan, timeout_s, link, last, clip_norm, arrived)

    @property
    def _clip_norm(self) -> float | None:
        """Of the round's updates; None: they are not clipped."""
        return self._private.clip_norm if self._private else None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model from the units that finished; None where the round was skipped, or models
        are not averaged. Raises as ``start``."""
        now, came = self._round, time.perf_counter()
        del self._round  # and the weights that were sent
        self._heads.close()
        finished, failures = self._outcomes(now, replies)
        round_ = now.decision.plan.round
        summed: ClippedSum | None = None
        if now.masked is not None:
            masked = {unit: reply.weights for unit, reply in finished.items()}
            summed = now.masked.sum(masked, self.model.trained)
            if summed is None:
                now, finished = now.skipped_for(now.masked.skipped), {}
        elif now.sent:  # of a masked round others may fail by one's fault
            self._scheduler.note_failures(round_, failures, finished)
            now = now if finished else now.skipped_for("every unit failed")
        reports = {unit: reply.report for unit, reply in finished.items()}
        losses = {unit: sum(each.losses) / len(each.losses) for unit, each in reports.items()}
        train_loss = arrays = metrics = observation = None
        if finished:
            shares = self._shares(reports)
            train_loss = float(np.average([*losses.values()], weights=[*shares.values()]))
            metrics = MetricRecord({"train_loss": train_loss})
            models = {u: each.weights | self._heads.weights(u) for u, each in finished.items()}
            moved = self._learn(round_, models, shares, summed)
            if moved is not None:
                last = self._scheduler.state.observation
                factor = self._settings.federation.max_update_norm or BELIEVED
                observation = observed(reports, losses, shares, moved, factor, last)
        self._heads.keep_states({unit: each.head_state for unit, each in finished.items()})
        plans, compression = now.decision.plan.clusters, self._settings.compression
        sums = totals(finished, now.sent, now.head_states, plans, compression, now.masked)
        late = {} if now.masked is None else now.masked.failures  # after its update has arrived
        missed, present = {**late, **failures}, finished.keys() - late.keys()
        self._scheduler.update_states(
            {unit: reply.state for unit, reply in finished.items()}
            | self._units.attendance.end_round(round_, missed, present)
        )
        asked = time.perf_counter()
        kept_bytes = self._store_kept(round_)
        stored_s = time.perf_counter() - asked
        sums["bytes_up"] += sum(kept_bytes.values())
        report = self._scheduler.end(
            now.decision,
            losses,
            kept_bytes,
            time.perf_counter() - now.began,
            observation,
            reports,
            units=tuple(finished),
            failures={unit: f"{f.kind}: {f.message}" for unit, f in failures.items()},
            train_loss=train_loss,
            epsilon=self.epsilon,
            **sums,
        )
        if observation is not None:
            arrays = self._arrays = ArrayRecord(self.model.weights)
        self._on_round(self._result(now, came, stored_s, report))
        return arrays, metrics

    def evaluate_on_units(self, split: Split) -> UnitsEvaluation:
        """The model as it is by now, on the rows of the units that are there."""
        labels, excluded = self._tokenizer.labels, self._scheduler.excluded
        return evaluate_on_units(self._units, excluded, self._settings, labels, self.model, split)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []  # whoever runs the rounds asks for it, see ``evaluate_on_units``

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def _outcomes(
        self, now: _Round, replies: Iterable[Message]
    ) -> tuple[dict[int, TrainReply], dict[int, Failure]]:
        """The replies of the units that finished, and why the others of the plan did not."""
        plan = now.decision.plan
        came_from = {message.metadata.src_node_id: message for message in replies}
        outcomes = dict[int, TrainReply | Failure](now.masked.failures if now.masked else {})
        for each in plan.clusters:
            if now.masked and each.unit not in now.masked.requests:
                continue  # it got no message
            seen = self._heads.target_tokens(each.unit)
            message, sent = came_from.get(self._units.nodes[each.unit]), now.sent[each.unit]
            request, settings = now.decision.request, self._settings
            if message is not None and trained(message):
                self._units.arrived[each.unit] = plan.round
            expected = now.masked.expected(sent) if now.masked else None
            came = received(message, each, sent, seen, request, settings, expected)
            silent = isinstance(came, Failure) and came.kind == SILENT
            outcomes[each.unit] = came if silent else self._heads.failure(each.unit) or came
        outcomes |= self._outlying(outcomes, now.sent)
        finished = {u: o for u, o in outcomes.items() if isinstance(o, TrainReply)}
        failures = {u: o for u, o in outcomes.items() if isinstance(o, Failure)}
        return finished, failures

    def _outlying(
        self, outcomes: Mapping[int, TrainReply | Failure], sent: Mapping[int, Tensors]
    ) -> dict[int, Failure]:
        """Units whose weights are not averaged with the others', and why."""
        if not self._settings.framework.aggregate or self._screen.factor is None:
            return {}
        replies = {u: each for u, each in outcomes.items() if isinstance(each, TrainReply)}
        norms = {
            u: update_norm(each.weights | self._heads.own_weights(u), self.model.weights | sent[u])
            for u, each in replies.items()
        }
        return self._screen.outlying(norms, lambda: weights_norm(self.model.trained))

    def _learn(
        self,
        round_: int,
        models: Mapping[int, Tensors],
        shares: Mapping[int, float],
        summed: ClippedSum | None,
    ) -> float | None:
        """How far the model moved, None where each unit keeps its own. Of masked ``models`` the sum
        is known. Raises as ``start``."""
        if self._private is None:
            common = self._heads.common_weights(models)
            return self.model.learn(round_, models, shares, common, self._places.called)
        seed = derive(self._settings.privacy.noise_seed or 0, "privacy", round_)
        start = self.model.trained
        summed = summed or self._private.summed(models.values(), start)
        mean = self._private.mean(summed, start, seed)
        if self._settings.privacy.noise_by == "server":
            self._count(models)
        return self.model.move(round_, mean)

    def _before_sum(self, units: Collection[int]) -> None:
        """The server is about to learn a masked sum of ``units``. Where the noise is the units',
        nobody is trusted with more than that: the round counts, whatever comes of it."""
        if self._settings.privacy.noise_by == "units":
            self._count(units)

    def _count(self, units: Collection[int]) -> None:
        if self._private is not None and self._settings.privacy.noise_multiplier:
            self._private.count(units)
            self._on_account(self._private.rounds)

    def _shares(self, reports: Mapping[int, ClusterReport]) -> dict[int, float]:
        """Units' weights in the average, not normalised."""
        federation = self._settings.federation
        uniform = federation.weighting == "uniform"
        shares = {u: 1.0 if uniform else float(r.target_tokens) for u, r in reports.items()}
        return capped(shares, federation.max_share)

    def _result(
        self, now: _Round, came: float, stored_s: float, report: RoundReport
    ) -> RoundResult:
        """What the round leaves, the wall time of its phases among it."""
        ended = time.perf_counter() - stored_s
        seconds = {
            "send": now.left - now.began,
            "train": came - now.left,
            "aggregate": ended - came,
            "plan": now.planned - now.began,
            "round": ended - now.began,
            "checkpoint": stored_s,
        }
        bytes_down, self._units.bytes_down = self._units.bytes_down, 0
        request, state = now.decision.request, self._scheduler.state
        training = self._training_state
        return RoundResult(report, request, seconds, state, self.model, bytes_down, training)

    def _load(self, arrays: ArrayRecord) -> None:
        """The model's weights are those of ``arrays``, which mostly they are already."""
        if arrays is not self._arrays:
            self.model.weights, self._arrays = dict(arrays.to_torch_state_dict()), arrays

    def _restore(self, then: SchedulerState, training: TrainingState) -> None:
        known, excluded = self._units.nodes, self._scheduler.excluded
        missing = {unit: failure for unit, failure in excluded.items() if unit not in known}
        failures = self._units.restore(training.units)
        # what units keep of their devices' speeds is in the states by now, as it was then
        real = [each.unit for each in self._scheduler.clusters if each.real_devices]
        self._scheduler.update_states(self._units.states(real))
        self._scheduler.resume_from(then)
        self._scheduler.update_states(missing)
        self._heads.states = dict(training.heads)
        dim, dtype = self._settings.model.dim, getattr(torch, self._settings.pipeline.dtype)
        self._heads.memories = {
            unit: ActivationMemory.unpack(tensors, dim, dtype)
            for unit, tensors in training.activations.items()
        }
        self._scheduler.update_states(failures)

    def _store_kept(self, round_: int) -> dict[int, int]:
        """Bring what units keep to the round's checkpoint, if it has one; bytes of each unit."""
        sent, failures = dict[int, int](), dict[int, Failure]()
        if (store := self._on_checkpoint(round_)) is None:
            return sent
        clusters = self._scheduler.clusters

        def check(unit: int, kept: Kept) -> None:
            check_kept(kept, clusters[unit], round_, self.model, self._settings)

        def most(unit: int) -> dict[str, int]:
            return most_kept(clusters[unit], round_, self.model, self._settings)

        for unit, kept in self._units.kept(self._scheduler.excluded, most, check):
            if isinstance(kept, Failure):
                failures[unit] = kept
                continue
            sent[unit] = sum(map(records.num_bytes, kept.values()))
            if not store(unit, kept):
                break
        missed = self._units.attendance.end_round(round_, failures, ())
        self._scheduler.update_states(missed)  # as one that misses a round
        return sent

    def _training_state(self) -> TrainingState:
        model, heads = self.model, self._heads
        return TrainingState(
            weights=model.weights,
            own_models=model.own_models,
            server_optimizer=model.server_optimizer.state,
            heads=heads.states,
            activations={unit: memory.pack() for unit, memory in heads.memories.items()},
            update_norms=self._screen.past,
            privacy=self._private.packed() if self._private else {},
        )
