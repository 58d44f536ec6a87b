"""Run the rounds: each one plans, trains, aggregates and reports."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from collapipe.config import Settings
from collapipe.errors import ConfigError
from collapipe.models.split import HEAD, frozen_names
from collapipe.report import RoundReport, UnitsEvaluation
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import Split
from server_app.decoding.decoder import OnStep
from server_app.decoding.heads import Heads
from server_app.decoding.link import decoder_link
from server_app.kept_states import restore
from server_app.places import Places
from server_app.planning.scheduler import RoundDecision, Scheduler, SchedulerState
from server_app.rounds.aggregation import (
    Aggregated,
    OnAccount,
    aggregation_of,
    weights_in_average,
)
from server_app.rounds.arrays import arrays_of, fitted, untrained
from server_app.rounds.attendance import attended
from server_app.rounds.exchange import Exchange, Outbox, Outcomes
from server_app.rounds.figures import completed, mean_loss, trained_of
from server_app.rounds.global_model import GlobalModel, Updates
from server_app.rounds.kept import store_kept
from server_app.rounds.results import Arrival, Phases, RoundResult, RunState, Store, TrainingState
from server_app.rounds.screening import UpdateScreen
from server_app.rounds.units_evaluation import evaluate_on_units
from server_app.units import Units

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]  # round (0 before the first), model


class CollaPipeStrategy:
    """Federated training in which units pipeline encoders while the server trains the head.

    A ServerApp needs only ``start``:

        settings = config.load(context.run_config)
        replies = Units(grid, settings).rows()
        strategy = CollaPipeStrategy(settings, make_tokenizer(settings, replies.values()))
        strategy.start(grid=grid, initial_arrays=strategy.initial_arrays(), num_rounds=3)

    To run code between rounds, open the strategy and run them one by one:

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
            self._take(untrained(self._settings, self._tokenizer))
        return arrays_of(self.model.whole())

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
        self._check_rate("num_rounds", num_rounds)
        result = Result()
        with self.opened(grid, initial_arrays, timeout):
            for round_ in range(num_rounds + 1):
                loss = self.run_round(round_).report.train_loss if round_ else None
                if loss is not None:
                    result.train_metrics_clientapp[round_] = MetricRecord({"train_loss": loss})
                if evaluate_fn is not None:
                    found = evaluate_fn(round_, arrays_of(self.model.whole()))
                    if found is not None:
                        result.evaluate_metrics_serverapp[round_] = found
        result.arrays = arrays_of(self.model.whole())
        return result

    @contextmanager
    def opened(
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, timeout: float | None = None
    ) -> Iterator[None]:
        """Find the units and keep the decoder link open while the context is open.

        Without ``initial_arrays`` the run begins with the current ``model``, at first the untrained
        one. A unit has ``timeout`` seconds for a round, by default ``federation.round_timeout_s``.
        Raises ``ConfigError`` for arrays of another model and for a strategy that has run. If the
        nodes are not the run's units, raises ``ConfigError`` or ``RoundFailedError``.
        """
        settings = self._settings
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout={timeout}: must be seconds above 0, or None")
        if self._ran:
            raise ConfigError(
                "this strategy has already run; make another CollaPipeStrategy, and pass it the "
                "result's arrays to continue from them"
            )
        if initial_arrays is not None:  # a caller may have changed those of initial_arrays()
            self._take(dict(initial_arrays.to_torch_state_dict()))
        elif not self.model.weights:
            self._take(untrained(settings, self._tokenizer))
        model = self.model
        self._units = Units(
            grid=grid,
            settings=settings,
            tokenizer=self._tokenizer.pack(),
            frozen=model.fixed,
            digests=model.digests_on_units(),
            places=self._places,
        )
        self._state = self._scheduler.begin(self._units.discover())
        with decoder_link(settings) as link:
            vocabulary = self._tokenizer.vocabulary
            fixed = model.fixed.get(HEAD, {}) if link else {}
            self._heads = Heads(settings, vocabulary, link, self._on_step, fixed)
            self._exchange = Exchange(
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

        Rounds count from 1. Raises ``ConfigError`` if the strategy is not open, or ``round_`` is
        lower or after the end of ``optimizer.decay=linear``, and ``BudgetSpentError`` if the round
        would exceed ``privacy.max_epsilon``. Raises ``InfeasibleRoundError`` if the round has no
        plan and ``federation.on_infeasible`` is ``stop``. If all units have failed, raises
        ``NonFiniteLossError`` if their training diverged, ``StorageError`` if they had no disk
        space for their states, else ``RoundFailedError``. Also raises ``NonFiniteLossError`` if the
        new model is not finite.
        """
        self._check_open()
        if round_ < 1:
            raise ConfigError(f"round_={round_}: must be at least 1, the first round")
        self._check_rate("round_", round_)
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
        kept_bytes: Mapping[int, int] = {}
        if store is not None:
            roster, kept_bytes = store_kept(store, self._units, after.roster, round_, self.model)
            after = replace(after, roster=roster)
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
        return evaluate_on_units(self._units, roster, labels, self.model, split)

    def state(self) -> RunState:
        """Everything on which the next round depends; ``_restore`` is the inverse."""
        self._check_open()
        training = TrainingState(
            weights=self.model.weights,
            own_models=self.model.own_models,
            server_optimizer=self.model.server_optimizer.state,
            heads=self._heads.states,
            activations=self._heads.packed_memories(),
            update_norms=self._screen.past,
            privacy=self._aggregation.pack(),
        )
        return RunState(self._state, training)

    def _check_open(self) -> None:
        if not hasattr(self, "_exchange"):
            raise ConfigError(
                "this strategy is not open; run rounds inside `with strategy.opened(grid):`"
            )

    def _check_rate(self, name: str, round_: int) -> None:
        """Raise ``ConfigError`` for a round in which a linear decay leaves nothing to train."""
        rounds = self._settings.federation.rounds
        if self._settings.optimizer.decay == "linear" and round_ > rounds:
            raise ConfigError(
                f"{name}={round_}: optimizer.decay=linear ends with federation.rounds={rounds}; "
                "raise it"
            )

    def _take(self, model: Tensors) -> None:
        spec, vocabulary = self._settings.model, self._tokenizer.vocabulary
        self.model.take(fitted(model, self._settings, vocabulary), frozen_names(spec, vocabulary))

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
        self._heads.restore(training.heads, training.activations)

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
        reported = {unit: each.state for unit, each in outcomes.finished.items()}
        roster = attended(
            roster=state.roster,
            round_=round_,
            outcomes=outcomes,
            aggregated=aggregated,
            states=self._scheduler.checked(reported),
            independent=self._aggregation.independent,
            miss_limit=self._settings.federation.miss_limit,
            called=self._places.called,
        )
        return replace(state, roster=roster)

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
        trained = trained_of(
            finished=outcomes.finished,
            shares=shares,
            moved=aggregated.moved,
            last=state.observation,
            kept_bytes=kept_bytes,
            settings=self._settings,
        )
        if aggregated.skipped is not None:
            decision = replace(decision, skipped=aggregated.skipped)
        state, report = self._scheduler.end(state, decision, trained, measured_s)
        train_loss = mean_loss(trained.losses, shares)
        report = replace(report, train_loss=train_loss, epsilon=self.epsilon)
        return state, completed(
            report, outcomes, outbox.jobs, aggregated, self._settings.compression
        )
