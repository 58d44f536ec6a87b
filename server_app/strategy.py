"""The round as Flower messages: plan, send, collect, aggregate. Decides nothing by itself."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe.config import Settings
from collapipe.errors import NonFiniteLossError, RoundFailedError, one_line
from collapipe.models.split import HEAD
from collapipe.report import ClusterReport, RoundReport
from collapipe.seeds import derive
from collapipe.tensors import Tensors, all_finite
from collapipe.wire import records
from collapipe.wire.messages import Failure, TrainReply, TrainRequest
from collapipe.wire.upload import restore, upload_bytes
from server_app.aggregation import ServerOptimizer, average
from server_app.channel_noise import noise_variance, with_noise
from server_app.decoding.heads import Heads
from server_app.estimates import Sight
from server_app.plausible import check_report
from server_app.scheduler import Decision, Scheduler


@dataclass(frozen=True)
class _Round:
    """What is open between sending a round's messages and aggregating their replies.

    Attributes
    ----------
    models
        The whole model at the round's start, of each unit of the plan.
    names
        Of the weights that units get and return.
    began
        Of ``time.perf_counter``.
    """

    decision: Decision
    models: Mapping[int, Tensors]
    names: Collection[str]
    began: float

    def uploads(self, unit: int) -> Tensors:
        """What the unit got."""
        return {name: tensor for name, tensor in self.models[unit].items() if name in self.names}


class CollaPipeStrategy(Strategy):
    """A Flower strategy whose units pipeline encoders while the server trains the head.

    ``arrays`` of all methods is the whole model: embedding, blocks and head. Without ``heads``
    units get and train all of it: the baseline ``vanilla_fl``, or heads on the control units.
    ``frozen`` names weights that do not train; units have them already. Where the framework does
    not aggregate, each unit goes on with a model of its own and ``arrays`` is where all began.

    Attributes
    ----------
    report, decision
        What happened in the round aggregated last, and what it was planned from.
    weights
        The model that came of it.
    plan_s
        Seconds that the decision took.
    own_models
        Of the units that trained, where models are not averaged.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        units: Mapping[int, int],
        heads: Heads | None,
        frozen: Collection[str] = (),
    ) -> None:
        self.report: RoundReport | None = None
        self.decision: Decision | None = None
        self.plan_s = 0.0
        self.weights: Tensors = {}
        self.own_models: dict[int, Tensors] = {}
        self.server_optimizer = ServerOptimizer(settings.server_optimizer)
        self._settings, self._scheduler, self._heads = settings, scheduler, heads
        self._frozen = frozenset(frozen)
        self._units = dict(units)  # node → unit
        self._nodes = {unit: node for node, unit in units.items()}
        self._round: _Round | None = None

    def summary(self) -> None:
        """Nothing: the run's configuration is printed and saved by who starts it."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A ``train`` message for each unit of the round's plan; none where it is skipped."""
        began = time.perf_counter()
        decision = self.decision = self._scheduler.decide(server_round)
        self.plan_s = time.perf_counter() - began
        weights, clusters = records.unpack_tensors(arrays), decision.plan.clusters
        models = {c.unit: self.own_models.get(c.unit, weights) for c in clusters}
        links, names = {}, set(weights) - self._frozen
        if self._heads is not None:
            links = self._heads.open(server_round, models)
            names = {name for name in names if not name.startswith(f"{HEAD}.")}
        now = self._round = _Round(decision, models, names, began)
        common = records.select_arrays(arrays, names)
        timeout_s = self._settings.federation.round_timeout_s
        messages = []
        for cluster in clusters:
            unit = cluster.unit
            request = TrainRequest(server_round, cluster, timeout_s, links.get(unit))
            own = unit in self.own_models
            sent = records.pack_tensors(now.uploads(unit)) if own else common
            content, node = records.pack_request(request, sent), self._nodes[unit]
            messages.append(Message(content, node, records.TRAIN, group_id=str(server_round)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model from the units that finished; None where the round was skipped.

        Raises ``NonFiniteLossError`` if a unit's loss was, ``RoundFailedError`` if all failed.
        """
        now, self._round = self._round, None
        assert now is not None, "aggregate_train before configure_train"
        if self._heads is not None:
            self._heads.close()
        clusters = now.decision.plan.clusters
        timeout_s = self._settings.federation.round_timeout_s
        outcomes: dict[int, TrainReply | Failure] = {
            cluster.unit: Failure("Timeout", f"no answer in {timeout_s:g} s")
            for cluster in clusters
        }
        for message in replies:
            unit = self._units[message.metadata.src_node_id]
            outcomes[unit] = self._outcome(unit, message, now)
        finished = {u: o for u, o in outcomes.items() if isinstance(o, TrainReply)}
        failures = {u: o for u, o in outcomes.items() if isinstance(o, Failure)}
        if clusters:
            _stop_if_hopeless(server_round, finished, failures)
            self._learn(finished, now)
        if self._heads is not None:
            self._heads.keep_states(finished)
        losses = {unit: _mean_loss(reply) for unit, reply in finished.items()}
        states = {unit: reply.state for unit, reply in finished.items()}
        measured_s = time.perf_counter() - now.began
        sight = self._sight(finished, now)
        self._scheduler.end(now.decision, losses, states, measured_s, sight)
        self.report = self._report(finished, failures, now)
        if not clusters or not self._settings.framework.aggregate:
            return None, None
        return records.pack_tensors(self.weights), MetricRecord()

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

    def _outcome(self, unit: int, message: Message, now: _Round) -> TrainReply | Failure:
        if message.has_error():
            return Failure("ClientApp", one_line(message.error.reason))
        try:
            reply = records.unpack_reply(message.content)
            if isinstance(reply, Failure):
                return Failure(one_line(reply.kind), one_line(reply.message))
            self._check_report(unit, reply.report)
            precision = self._settings.compression.upload
            sent = restore(reply.weights, now.uploads(unit), precision, f"unit {unit}")
            weights = self._through_the_channel(unit, sent, now)
        except Exception as error:  # whatever a unit sends, it ends no round but its own
            return Failure(type(error).__name__, one_line(error))
        return TrainReply(weights, reply.report, reply.state)

    def _through_the_channel(self, unit: int, weights: Tensors, now: _Round) -> Tensors:
        """As a noisy uplink delivers them, where ``federation.channel_noise`` asks for one."""
        factor = self._settings.federation.channel_noise
        if not factor:
            return weights
        decision = now.decision
        constant_w = self._settings.tree["channel"]["interference_constant_w"]
        plan = next(each for each in decision.plan.clusters if each.unit == unit)
        variance = noise_variance(plan, decision.request, constant_w, factor)
        seed = derive(self._settings.seed, "channel_noise", decision.plan.round, unit)
        return with_noise(weights, variance, seed)

    def _check_report(self, unit: int, report: ClusterReport) -> None:
        seen = self._heads.target_tokens(unit) if self._heads else report.target_tokens
        check_report(report, unit, seen, self._settings)

    def _learn(self, finished: Mapping[int, TrainReply], now: _Round) -> None:
        """The units' models become one, or stay theirs."""
        round_ = now.decision.plan.round
        models = {
            unit: self._trained(
                {**reply.weights, **(self._heads.weights(unit) if self._heads else {})}
            )
            for unit, reply in finished.items()
        }
        if not self._settings.framework.aggregate:
            for unit, model in models.items():
                _check_finite(model, f"round {round_}: unit {unit}'s")
                self.own_models[unit] = {**now.models[unit], **model}
            return
        start = next(iter(now.models.values()))
        averaged = average(
            list(models.values()), [self._weight(reply) for reply in finished.values()]
        )
        if self._heads is not None and self._heads.shared:
            averaged.update(self._trained(self._heads.common_weights(finished)))
        new = {**start, **self.server_optimizer.step(self._trained(start), averaged)}
        _check_finite(new, f"round {round_}:")
        self.weights = new

    def _sight(self, finished: Mapping[int, TrainReply], now: _Round) -> Sight | None:
        """What the round showed of the loss that all units share; None where models are apart."""
        if not finished or not self._settings.framework.aggregate:
            return None
        norms = [np.mean(reply.report.squared_norms) for reply in finished.values()]
        losses = [_mean_loss(reply) for reply in finished.values()]
        weights = [self._weight(reply) for reply in finished.values()]
        start = self._trained(next(iter(now.models.values())))
        moved = sum(float((self.weights[name] - was).square().sum()) for name, was in start.items())
        return Sight(float(np.mean(norms)), float(np.average(losses, weights=weights)), moved**0.5)

    def _trained(self, weights: Tensors) -> Tensors:
        """Those that train: the others are what they were, to the last bit."""
        return {name: tensor for name, tensor in weights.items() if name not in self._frozen}

    def _weight(self, reply: TrainReply) -> float:
        uniform = self._settings.federation.weighting == "uniform"
        return 1.0 if uniform else float(reply.report.target_tokens)

    def _report(
        self, finished: Mapping[int, TrainReply], failures: Mapping[int, Failure], now: _Round
    ) -> RoundReport:
        reports = [reply.report for reply in finished.values()]
        weights = [self._weight(reply) for reply in finished.values()]
        losses = [_mean_loss(reply) for reply in finished.values()]
        phases = sorted({phase for report in reports for phase in report.seconds})
        up, down = self._model_bytes(list(finished), now)
        return replace(
            self._scheduler.report(now.decision),
            units=tuple(finished),
            failures={unit: f"{f.kind}: {f.message}" for unit, f in failures.items()},
            train_loss=float(np.average(losses, weights=weights)) if losses else None,
            samples=sum(report.samples for report in reports),
            target_tokens=sum(report.target_tokens for report in reports),
            bytes_up=up + sum(report.link_bytes_up for report in reports),
            bytes_down=down + sum(report.link_bytes_down for report in reports),
            seconds={
                f"unit/{p}": sum(r.seconds.get(p, 0.0) for r in reports) / len(reports)
                for p in phases
            },
        )

    def _model_bytes(self, finished: Sequence[int], now: _Round) -> tuple[int, int]:
        """Weights of all units together, up and down."""
        if not finished:
            return 0, 0
        one = now.uploads(finished[0])
        up, down = upload_bytes(one, self._settings.compression.upload), records.num_bytes(one)
        return up * len(finished), down * len(finished)


def _check_finite(model: Tensors, whose: str) -> None:
    odd = next((name for name, tensor in model.items() if not all_finite(tensor)), None)
    if odd is not None:
        raise NonFiniteLossError(
            f"{whose} {odd} is NaN or infinite after the aggregation; "
            "lower optimizer.lr or server_optimizer.lr"
        )


def _mean_loss(reply: TrainReply) -> float:
    return sum(reply.report.losses) / len(reply.report.losses)


def _stop_if_hopeless(
    round_: int, finished: Mapping[int, TrainReply], failures: Mapping[int, Failure]
) -> None:
    for failure in failures.values():
        if failure.kind == NonFiniteLossError.__name__:
            raise NonFiniteLossError(failure.message)
    if not finished:
        causes = "; ".join(f"unit {unit}: {f.kind}: {f.message}" for unit, f in failures.items())
        raise RoundFailedError(f"round {round_}: every unit failed: {causes}")
