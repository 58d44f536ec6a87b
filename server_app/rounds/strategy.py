"""Run the rounds: each one plans, trains, aggregates and reports."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from collapipe.config import Settings
from collapipe.deployment.server_folder import own_folder
from collapipe.errors import ConfigError
from collapipe.models.kept import NARROW
from collapipe.models.split import HEAD, SplitModel, frozen_names
from collapipe.models.without_values import WithoutValues
from collapipe.report import RoundReport, UnitsEvaluation
from collapipe.runs.model import initial_model
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.feedback import ActivationMemory
from collapipe.wire.messages import Failure, Split
from server_app import questions
from server_app.decoding.decoder import OnStep
from server_app.decoding.heads import Heads
from server_app.decoding.link import DecoderLinkServer
from server_app.kept_states import gather, restore
from server_app.places import Places
from server_app.planning.estimates import DEFAULT_FACTOR, observed
from server_app.planning.scheduler import RoundDecision, Scheduler, SchedulerState, Trained
from server_app.questions import Question
from server_app.rounds.aggregation import (
    Aggregated,
    OnAccount,
    Updates,
    aggregation_of,
    weights_in_average,
)
from server_app.rounds.exchange import Exchange, Outbox, Outcomes, totals
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.kept import check_kept, most_kept
from server_app.rounds.results import Arrival, Phases, RoundResult, RunState, Store, TrainingState
from server_app.rounds.screening import UpdateScreen
from server_app.rounds.units_evaluation import evaluate_on_units
from server_app.units import Kept, Units

_log = logging.getLogger(__name__)

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]  # round (0 before the first), model


class CollaPipeStrategy:
    """Federated training in which units pipeline encoders while the server trains the head.

    A ServerApp needs only ``start``::

        settings = config.load(context.run_config)
        replies = Units(grid, settings).rows()
        strategy = CollaPipeStrategy(settings, make_tokenizer(settings, replies.values()))
        strategy.start(grid=grid, initial_arrays=strategy.initial_arrays(), num_rounds=3)

    To run code between rounds, open the strategy and run them one by one::

        with strategy.opened(grid, strategy.initial_arrays()):
            for round_ in range(1, 4):
                result = strategy.run_round(round_)

    Arrays are the whole model: embedding, blocks and head. If the server has no heads, units
    receive and train the whole model. If the framework does not aggregate, each unit keeps a
    separate model. A strategy runs once: its queues, optimisers and ε belong to one run.

    ``places`` maps names to units if the run knows names already. The decoder link's threads call
    ``on_step`` after each local step. ``on_account`` receives the number of rounds that ε counts
    for each unit, before the model of the last round is released. A resumed run passes the
    ``state`` of its checkpoint, and the ``account`` with all rounds that ε counts.
    """

    _units: Units  # since the strategy was opened
    _state: SchedulerState
    _heads: Heads  # while it is open
    _exchange: Exchange

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        *,
        places: Places | None = None,
        on_step: OnStep = lambda unit, step, loss, samples, tokens: None,
        on_account: OnAccount = lambda rounds: None,
        state: RunState | None = None,
        account: Mapping[int, int] | None = None,
    ) -> None:
        self._settings, self._tokenizer, self._on_step = settings, tokenizer, on_step
        self._places, self._checkpoint = places or Places(), state
        self._scheduler = Scheduler(settings, self._places.name)
        self.model = GlobalModel(settings)
        self._aggregation = aggregation_of(settings, self.model, self._places.called, on_account)
        screened = settings.framework.aggregate
        self._ran = False
        self._screen = UpdateScreen(settings.federation.max_update_norm if screened else None)
        if state is not None:
            training = state.training
            self.model.weights = training.weights
            self.model.own_models = dict(training.own_models)
            self.model.server_optimizer.state = training.server_optimizer
            self._screen.past = dict(training.update_norms)
            self._aggregation.restore(training.privacy, account or {})

    def initial_arrays(self) -> ArrayRecord:
        """The untrained model, or the checkpoint's model in a resumed run."""
        if self._checkpoint is None:
            self._take_untrained()
        return _arrays_of(self.model.whole())

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far; None without noise."""
        return self._aggregation.epsilon

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run rounds 1 … ``num_rounds``; see ``opened`` and ``run_round``.

        ``evaluate_fn`` is called with the model before the first round and after each one.
        """
        if num_rounds < 0:
            raise ConfigError(f"num_rounds={num_rounds}: must be 0 or more")
        result = Result()
        with self.opened(grid, initial_arrays, timeout):
            for round_ in range(num_rounds + 1):
                loss = self.run_round(round_).report.train_loss if round_ else None
                if loss is not None:
                    result.train_metrics_clientapp[round_] = MetricRecord({"train_loss": loss})
                if evaluate_fn is not None:
                    found = evaluate_fn(round_, _arrays_of(self.model.whole()))
                    if found is not None:
                        result.evaluate_metrics_serverapp[round_] = found
        result.arrays = _arrays_of(self.model.whole())
        return result

    @contextmanager
    def opened(
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, timeout: float | None = None
    ) -> Iterator[None]:
        """Find the units and keep the decoder link open while the context is open.

        Without ``initial_arrays`` the run begins with the current ``model``, at first the untrained
        one. A unit has ``timeout`` seconds for a round, by default ``federation.round_timeout_s``.
        Raises ``ConfigError`` for arrays of another model and for a strategy that has run, and
        ``ConfigError`` or ``RoundFailedError`` if the nodes are not the run's units.
        """
        settings = self._settings
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout={timeout}: must be seconds above 0, or None")
        if self._ran:
            raise ConfigError(
                "this strategy has already run; make another CollaPipeStrategy, and pass it the "
                "result's arrays to go on from them"
            )
        if initial_arrays is not None:  # a caller may have changed those of initial_arrays()
            self._take(dict(initial_arrays.to_torch_state_dict()))
        elif not self.model.weights:
            self._take_untrained()
        model, packed = self.model, self._tokenizer.pack()
        digests = model.digests_on_units()
        self._units = Units(grid, settings, packed, model.fixed, digests, self._places)
        self._state = self._scheduler.begin(self._units.discover())
        with _decoder_link(settings) as link:
            vocabulary = self._tokenizer.vocabulary
            fixed = model.fixed.get(HEAD, {}) if link else {}
            self._heads = Heads(settings, vocabulary, link, self._on_step, fixed)
            self._exchange = Exchange(
                settings=settings,
                units=self._units,
                model=model,
                heads=self._heads,
                aggregation=self._aggregation,
                screen=self._screen,
                timeout_s=settings.federation.round_timeout_s if timeout is None else timeout,
            )
            self._ran = True
            if self._checkpoint is not None:
                self._restore(self._checkpoint)
            try:
                yield
            finally:
                del self._heads, self._exchange  # and the optimisers' memory

    def run_round(self, round_: int, store: Store | None = None) -> RoundResult:
        """Plan a round, train on the units, aggregate, and save the units' states to a ``store``.

        Raises ``InfeasibleRoundError`` if the round has no plan and ``federation.on_infeasible`` is
        ``stop``, and ``NonFiniteLossError`` if the training of all units diverged or the new model
        is not finite. Raises ``RoundFailedError`` if all units have failed, ``StorageError`` if no
        unit has disk space for its state, and ``BudgetSpentError`` if the round would exceed
        ``privacy.max_epsilon``, and ``ConfigError`` if the strategy is not open.
        """
        self._check_open()
        phases, (before, arrivals) = Phases(), self._with_arrivals(self._state, round_)
        decision = self._scheduler.decide(before, round_)
        phases.end("plan")
        outbox = self._exchange.prepare(decision)
        phases.end("send")
        replies = self._exchange.send(outbox)
        phases.end("train")
        outcomes = self._exchange.outcomes(decision, outbox, replies)
        shares = weights_in_average(outcomes.finished, self._settings.federation)
        outcomes, aggregated = self._aggregate(decision, outcomes, shares)
        after = self._with_outcomes(before, round_, outcomes, aggregated)
        phases.end("aggregate")
        round_s = phases.total_s
        after, kept_bytes = self._stored(after, round_, store) if store else (after, {})
        phases.end("checkpoint")
        self._state, report = self._ended(
            after, decision, outbox, outcomes, shares, aggregated, kept_bytes, phases.total_s
        )
        bytes_down, self._units.bytes_down = self._units.bytes_down, 0
        seconds = {**phases.seconds, "round": round_s}
        return RoundResult(report, decision.request, seconds, arrivals, bytes_down)

    def evaluate_on_units(self, split: Split) -> UnitsEvaluation:
        """Evaluate the current model on the rows of the units that are present."""
        roster, labels = self._state.roster, self._tokenizer.labels
        return evaluate_on_units(self._units, roster, self._settings, labels, self.model, split)

    def state(self) -> RunState:
        """Everything on which the next round depends; ``_restore`` is the inverse."""
        self._check_open()
        heads = self._heads
        training = TrainingState(
            weights=self.model.weights,
            own_models=self.model.own_models,
            server_optimizer=self.model.server_optimizer.state,
            heads=heads.states,
            activations={unit: memory.pack() for unit, memory in heads.memories.items()},
            update_norms=self._screen.past,
            privacy=self._aggregation.pack(),
        )
        return RunState(self._state, training)

    def _take_untrained(self) -> None:
        first = initial_model(self._settings, self._tokenizer).state_dict()
        self._take({name: tensor.detach() for name, tensor in first.items()})

    def _check_open(self) -> None:
        if not hasattr(self, "_exchange"):
            raise ConfigError(
                "this strategy is not open; run rounds inside `with strategy.opened(grid):`"
            )

    def _take(self, model: Tensors) -> None:
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        with WithoutValues():
            own = SplitModel(spec, vocabulary).state_dict()
        narrow = {name: each.dtype for name, each in own.items() if each.dtype in NARROW.values()}
        _check_form(model, own, getattr(torch, self._settings.pipeline.dtype))
        kept = {name: each.to(narrow.get(name, each.dtype)) for name, each in model.items()}
        self.model.take(kept, frozen_names(spec, vocabulary))

    def _restore(self, state: RunState) -> None:
        training, known = state.training, self._units.nodes
        now = self._state.roster
        missing = {unit: why for unit, why in now.excluded.items() if unit not in known}
        failures = restore(self._units, training.units)
        # the units' states now have the devices' speeds as they were at the checkpoint
        real = [each.unit for each in now.clusters if each.real_devices]
        now = now.updated(self._scheduler.checked(self._units.states(real)))
        then = self._scheduler.resumed(state.scheduler, now)
        self._state = replace(then, roster=then.roster.updated({**missing, **failures}))
        self._heads.states = dict(training.heads)
        dim, dtype = self._settings.model.dim, getattr(torch, self._settings.pipeline.dtype)
        self._heads.memories = {
            unit: ActivationMemory.unpack(tensors, dim, dtype)
            for unit, tensors in training.activations.items()
        }

    def _with_arrivals(
        self, state: SchedulerState, round_: int
    ) -> tuple[SchedulerState, tuple[Arrival, ...]]:
        """Ask excluded units and new nodes for their clusters. Returns the units that answered
        after the state that has them."""
        known = {*self._units.nodes}
        reported, silent = self._units.ask_again(round_, state.roster)
        roster = state.roster.called(round_, silent, self._scheduler.checked(reported))
        return replace(state, roster=roster), tuple(
            Arrival(each, unit not in known)
            for unit, each in reported.items()
            if isinstance(each, ClusterState)
        )

    def _aggregate(
        self, decision: RoundDecision, outcomes: Outcomes, shares: Mapping[int, float]
    ) -> tuple[Outcomes, Aggregated]:
        """Make the next model; if the updates are not used, no unit counts as finished."""
        finished = outcomes.finished
        if not decision.plan.clusters:
            return outcomes, Aggregated()
        models = {u: reply.weights | self._heads.weights(u) for u, reply in finished.items()}
        common = self._heads.common_weights(finished) if finished else {}
        updates = Updates(models, shares, common)
        aggregated = self._aggregation.close(decision.plan.round, updates)
        if aggregated.skipped is not None:
            outcomes = replace(outcomes, finished={})
        self._heads.keep_states({u: each.head_state for u, each in outcomes.finished.items()})
        return outcomes, aggregated

    def _with_outcomes(
        self, state: SchedulerState, round_: int, outcomes: Outcomes, aggregated: Aggregated
    ) -> SchedulerState:
        """Return the state with units that finished, failed or were absent. Raises an error if all
        have failed."""
        finished, failures, roster = outcomes.finished, outcomes.failures, state.roster
        if not self._aggregation.independent:
            faults = {unit: aggregated.late[unit] for unit in aggregated.dishonest}
            roster = roster.after_failures(round_, faults, finished.keys() - faults.keys())
        elif finished or failures:
            roster = roster.after_failures(round_, failures, finished)
            if not finished:
                roster.check(round_, self._places.called)
        states = self._scheduler.checked({u: each.state for u, each in finished.items()})
        for unit, each in states.items():
            if isinstance(each, Failure):
                _log.warning(
                    "round %d: %s is excluded until it reports devices with which it can be "
                    "planned: %s: %s",
                    *(round_, self._places.called(unit), each.kind, each.message),
                )
        roster = roster.updated(states).after_absences(
            round_,
            failures={**aggregated.late, **failures},
            present=finished.keys() - aggregated.late.keys(),
            miss_limit=self._settings.federation.miss_limit,
        )
        return replace(state, roster=roster)

    def _stored(
        self, state: SchedulerState, round_: int, store: Store
    ) -> tuple[SchedulerState, dict[int, int]]:
        """Save the units' states to the round's checkpoint. Returns the state with the units that
        did not send theirs, and the bytes of each other unit."""
        sent, failures, roster = dict[int, int](), dict[int, Failure](), state.roster
        clusters = roster.clusters

        def question(unit: int) -> Question[Kept]:
            then = clusters[unit], round_, self.model, self._settings
            return questions.keep(most_kept(*then), lambda kept: check_kept(kept, *then))

        unstored = list[int]()  # because the server's disk is full
        for unit, kept in gather(self._units, roster, question, more=lambda: not unstored):
            if isinstance(kept, Failure):
                failures[unit] = kept
                continue
            sent[unit] = sum(map(records.num_bytes, kept.values()))
            if not store(unit, kept):
                unstored.append(unit)
        limit = self._settings.federation.miss_limit
        roster = roster.after_absences(round_, failures, present=(), miss_limit=limit)
        return replace(state, roster=roster), sent

    def _ended(
        self,
        state: SchedulerState,
        decision: RoundDecision,
        outbox: Outbox,
        outcomes: Outcomes,
        shares: Mapping[int, float],
        aggregated: Aggregated,
        kept_bytes: Mapping[int, int],
        measured_s: float,
    ) -> tuple[SchedulerState, RoundReport]:
        """Return the state for the next round, and the round's report."""
        finished = outcomes.finished
        failures = {u: f for u, f in aggregated.late.items() if u not in finished}
        failures |= outcomes.failures
        reports = {unit: reply.report for unit, reply in finished.items()}
        losses = {unit: sum(each.losses) / len(each.losses) for unit, each in reports.items()}
        train_loss = observation = None
        if finished:
            train_loss = float(np.average([*losses.values()], weights=[*shares.values()]))
        if aggregated.moved is not None:
            last = state.observation
            factor = self._settings.federation.max_update_norm or DEFAULT_FACTOR
            observation = observed(reports, losses, shares, aggregated.moved, factor, last)
        trained = Trained(losses, reports, observation, kept_bytes)
        if aggregated.skipped is not None:
            decision = replace(decision, skipped=aggregated.skipped)
        state, report = self._scheduler.end(state, decision, trained, measured_s)
        sums = totals(finished, outbox.jobs, self._settings.compression)
        sums["bytes_up"] += aggregated.bytes_up + report.checkpoint_bytes
        sums["bytes_down"] += aggregated.bytes_down
        return state, replace(
            report,
            units=tuple(finished),
            failures={u: f"{f.kind}: {f.message}" for u, f in failures.items()},
            train_loss=train_loss,
            epsilon=self.epsilon,
            **sums,
        )


def _check_form(model: Tensors, own: Tensors, dtype: torch.dtype) -> None:
    """Raise ``ConfigError`` unless arrays have the names and shapes of the run's ``own`` model, and
    the ``dtype``; narrow weights may have any floating-point dtype."""
    if mismatched := sorted(model.keys() ^ own.keys()):
        fault = "is no weight of the run's model" if mismatched[0] in model else "is missing"
        raise ConfigError(f"initial arrays: {mismatched[0]!r} {fault}; begin with initial_arrays()")
    for name, each in model.items():
        like = own[name]
        wanted = dtype if like.dtype == torch.float32 else like.dtype
        fits = each.is_floating_point() if wanted in NARROW.values() else each.dtype == wanted
        if not fits or each.shape != like.shape:
            raise ConfigError(
                f"initial arrays: {name!r} is {each.dtype} {list(each.shape)}, expected {wanted} "
                f"{list(like.shape)}"
            )


def _decoder_link(settings: Settings) -> AbstractContextManager[DecoderLinkServer | None]:
    """The server's end of the decoder link; None if units have all heads."""
    if not settings.server_has_heads:
        return nullcontext()
    server = own_folder()
    certified = server.identity() if server else None
    return DecoderLinkServer(settings.link, settings.federation.num_units, certified)


def _arrays_of(weights: Tensors) -> ArrayRecord:
    """Return an array for each weight. numpy has no bfloat16: such weights become float32."""
    narrow = torch.bfloat16
    wide = {name: each.float() if each.dtype == narrow else each for name, each in weights.items()}
    return ArrayRecord(wide)
