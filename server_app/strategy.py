"""The round as Flower messages: plan, send, collect, aggregate. Decides nothing by itself."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe import wire
from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError, RoundFailedError, WireError
from collapipe.models.part import HeadPart, Tensors, select
from collapipe.models.split import HEAD, build_empty
from collapipe.plan import ClusterPlan
from collapipe.report import RoundReport
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tasks.tokenizer import Vocabulary
from collapipe.wire import Failure, LinkAddress, TrainReply, TrainRequest
from optim.planner import Planner, RoundRequest
from server_app.aggregation import ServerOptimizer, average
from server_app.decoder import DecoderSession, OnStep, SessionPlan
from server_app.link import DecoderLinkServer

_SHARED = -1  # whose optimiser state it is when all units share a head


@dataclass
class _Round:
    """What is open between sending a round's messages and aggregating their replies."""

    number: int
    weights: Tensors
    units: dict[int, int]  # node → unit
    bytes_down: dict[int, int] = field(default_factory=dict)
    sessions: dict[int, DecoderSession] = field(default_factory=dict)
    addresses: list[LinkAddress] = field(default_factory=list)


class CollaPipeStrategy(Strategy):
    """A Flower strategy whose units pipeline encoders while the server trains the head.

    ``arrays`` of all methods is the whole model: embedding, blocks and head. Without ``link`` it is
    the baseline ``vanilla_fl``: units get and train all of it.

    Attributes
    ----------
    report
        What happened in the round aggregated last.
    """

    def __init__(
        self,
        settings: Settings,
        planner: Planner,
        vocabulary: Vocabulary,
        states: Mapping[int, ClusterState],
        link: DecoderLinkServer | None,
        on_step: OnStep,
    ) -> None:
        self.report: RoundReport | None = None
        self._settings, self._planner, self._vocabulary = settings, planner, vocabulary
        self._nodes = {state.unit: node for node, state in states.items()}
        self._clusters = tuple(sorted(states.values(), key=lambda state: state.unit))
        self._link, self._on_step = link, on_step
        self._server_optimizer = ServerOptimizer(settings.server_optimizer)
        self._head_states: dict[int, Tensors] = {}
        self._round: _Round | None = None

    def summary(self) -> None:
        """Nothing: the run's configuration is printed and saved by who starts it."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A ``train`` message for each unit of the round's plan."""
        settings = self._settings
        request = RoundRequest(
            server_round,
            self._clusters,
            settings.model.num_blocks,
            settings.pipeline.num_segments,
            settings.pipeline.num_micro_batches,
            settings.pipeline.schedule,
        )
        rng = np.random.default_rng(derive(settings.seed, "plan", server_round))
        plan = self._planner.plan_round(request, rng)
        weights = wire.unpack_tensors(RecordDict({"arrays": arrays}), "arrays")
        units = {self._nodes[cluster.unit]: cluster.unit for cluster in plan.clusters}
        self._round = _Round(server_round, weights, units)
        head = self._build_head(weights) if self._shared else None
        return [self._message(cluster, head) for cluster in plan.clusters]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model from the units that finished.

        Raises ``NonFiniteLossError`` if a unit's loss was, ``RoundFailedError`` if all failed.
        """
        now = self._current()
        for address in now.addresses:
            assert self._link is not None
            self._link.close(address)
        outcomes: dict[int, TrainReply | Failure] = dict.fromkeys(
            now.units.values(),
            Failure("Timeout", f"no answer in {self._settings.federation.round_timeout_s:g} s"),
        )
        for message in replies:
            unit = now.units[message.metadata.src_node_id]
            outcomes[unit] = self._outcome(unit, message)
        finished = {u: o for u, o in outcomes.items() if isinstance(o, TrainReply)}
        failures = {u: o for u, o in outcomes.items() if isinstance(o, Failure)}
        _stop_if_hopeless(server_round, finished, failures)
        new = self._aggregate(finished)
        self._keep_head_states(finished)
        self.report = self._report(finished, failures)
        self._round = None
        metrics = MetricRecord({"train_loss": self.report.train_loss})
        return wire.pack_tensors(new), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: the server evaluates."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """None: the server evaluates."""
        return None

    @property
    def _shared(self) -> bool:
        return self._link is not None and self._settings.decoder.mode == "shared"

    def _current(self) -> _Round:
        assert self._round is not None, "aggregate_train before configure_train"
        return self._round

    def _message(self, cluster: ClusterPlan, shared_head: HeadPart | None) -> Message:
        now = self._current()
        weights, link = now.weights, None
        if self._link is not None:
            session = self._session(cluster.unit, shared_head)
            now.sessions[cluster.unit] = session
            link = self._link.open(session)
            now.addresses.append(link)
            weights = {k: v for k, v in weights.items() if not k.startswith(f"{HEAD}.")}
        now.bytes_down[cluster.unit] = wire.num_bytes(weights)
        timeout_s = self._settings.federation.round_timeout_s
        request = TrainRequest(now.number, cluster, weights, timeout_s, link)
        content = wire.pack_request(request)
        return Message(content, self._nodes[cluster.unit], wire.TRAIN, group_id=str(now.number))

    def _session(self, unit: int, shared_head: HeadPart | None) -> DecoderSession:
        settings, now = self._settings, self._current()
        plan = SessionPlan(
            unit,
            now.number,
            settings.seed,
            settings.model.num_blocks,
            settings.model.dim,
            settings.federation.steps_of(now.number),
            settings.federation.total_steps,
            self._vocabulary.size,
        )
        if shared_head is not None:
            return DecoderSession(plan, shared_head, settings.optimizer, self._turn, self._on_step)
        head = self._build_head(now.weights, unit)
        return DecoderSession(plan, head, settings.optimizer, nullcontext(), self._on_step)

    def _build_head(self, weights: Tensors, unit: int = _SHARED) -> HeadPart:
        spec, optimizer = self._settings.model, self._settings.optimizer
        copies = {name: value.clone() for name, value in select(weights, HEAD).items()}
        module = build_empty(lambda: spec.build_head(self._vocabulary), copies)
        state = {} if optimizer.state == "reset" else self._head_states.get(unit, {})
        self._turn = threading.Lock()  # of a shared head; a new one, should a round have kept it
        return HeadPart(HEAD, module, optimizer, state)

    def _outcome(self, unit: int, message: Message) -> TrainReply | Failure:
        if message.has_error():
            return Failure("ClientApp", str(message.error.reason).splitlines()[0])
        try:
            reply = wire.unpack_reply(message.content)
            if isinstance(reply, TrainReply):
                self._check(unit, reply)
        except WireError as error:
            return Failure(type(error).__name__, str(error))
        return reply

    def _check(self, unit: int, reply: TrainReply) -> None:
        now = self._current()
        session = now.sessions.get(unit)
        if reply.report.unit != unit or (session is not None and not session.complete):
            raise WireError(f"unit {unit} answered, but not after all steps of its own round")
        head = session is not None
        expected = {k: v for k, v in now.weights.items() if not (head and k.startswith(f"{HEAD}."))}
        wire.check_like(reply.weights, expected, f"unit {unit}")

    def _aggregate(self, finished: Mapping[int, TrainReply]) -> Tensors:
        now = self._current()
        models = []
        for unit, reply in finished.items():
            session = now.sessions.get(unit)
            models.append({**reply.weights, **(session.part.weights() if session else {})})
        weights = [self._weight(reply) for reply in finished.values()]
        averaged = average(models, weights)
        if self._shared:  # one head, trained by all: nothing to average, and no rounding
            first = next(iter(now.sessions.values()))
            averaged.update(first.part.weights())
        return self._server_optimizer.step(now.weights, averaged)

    def _weight(self, reply: TrainReply) -> float:
        uniform = self._settings.federation.weighting == "uniform"
        return 1.0 if uniform else float(reply.report.target_tokens)

    def _keep_head_states(self, finished: Mapping[int, TrainReply]) -> None:
        for unit, session in self._current().sessions.items():
            if unit in finished:
                owner = _SHARED if self._shared else unit
                self._head_states[owner] = session.part.optimizer_state()

    def _report(
        self, finished: Mapping[int, TrainReply], failures: Mapping[int, Failure]
    ) -> RoundReport:
        now = self._current()
        reports = [reply.report for reply in finished.values()]
        weights = [self._weight(reply) for reply in finished.values()]
        losses = [sum(report.losses) / len(report.losses) for report in reports]
        phases = sorted({phase for report in reports for phase in report.seconds})
        return RoundReport(
            round=now.number,
            units=tuple(finished),
            failures={unit: f"{f.kind}: {f.message}" for unit, f in failures.items()},
            train_loss=float(np.average(losses, weights=weights)),
            samples=sum(report.samples for report in reports),
            target_tokens=sum(report.target_tokens for report in reports),
            bytes_up=sum(
                reply.report.link_bytes_up + wire.num_bytes(reply.weights)
                for reply in finished.values()
            ),
            bytes_down=sum(
                reply.report.link_bytes_down + now.bytes_down[unit]
                for unit, reply in finished.items()
            ),
            seconds={
                f"unit/{p}": sum(r.seconds.get(p, 0.0) for r in reports) / len(reports)
                for p in phases
            },
        )


def _stop_if_hopeless(
    round_: int, finished: Mapping[int, TrainReply], failures: Mapping[int, Failure]
) -> None:
    for failure in failures.values():
        if failure.kind == NonFiniteLossError.__name__:
            raise NonFiniteLossError(failure.message)
    if not finished:
        causes = "; ".join(f"unit {unit}: {f.kind}: {f.message}" for unit, f in failures.items())
        raise RoundFailedError(f"round {round_}: every unit failed: {causes}")
