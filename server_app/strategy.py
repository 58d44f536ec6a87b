"""The round as Flower messages: plan, send, collect, aggregate. Decides nothing by itself."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from collapipe import wire
from collapipe.config import Settings
from collapipe.errors import InfeasibleRoundError, NonFiniteLossError, RoundFailedError, WireError
from collapipe.messages import Failure, TrainReply, TrainRequest
from collapipe.models.part import Tensors, all_finite
from collapipe.models.split import HEAD
from collapipe.plan import RoundPlan
from collapipe.presets import ChannelPreset
from collapipe.report import ClusterReport, RoundReport
from collapipe.seeds import derive
from collapipe.state import ClusterState
from optim.planner import Planner, RoundRequest
from optim.verify import verify_plan
from server_app.aggregation import ServerOptimizer, average
from server_app.heads import Heads


@dataclass(frozen=True)
class _Round:
    """What is open between sending a round's messages and aggregating their replies."""

    plan: RoundPlan
    weights: Tensors  # the whole model at the round's start
    uploads: Tensors  # the part of it that units get and return


class CollaPipeStrategy(Strategy):
    """A Flower strategy whose units pipeline encoders while the server trains the head.

    ``arrays`` of all methods is the whole model: embedding, blocks and head. Without ``heads``
    units get and train all of it: the baseline ``vanilla_fl``, or heads on the control units.

    Attributes
    ----------
    report, weights
        What happened in the round aggregated last, and the model that came of it.
    """

    def __init__(
        self,
        settings: Settings,
        planner: Planner,
        states: Mapping[int, ClusterState],
        heads: Heads | None,
    ) -> None:
        self.report: RoundReport | None = None
        self.weights: Tensors = {}
        self._settings, self._planner, self._heads = settings, planner, heads
        self._nodes = {state.unit: node for node, state in states.items()}
        self._units = {node: state.unit for node, state in states.items()}
        self._clusters = tuple(sorted(states.values(), key=lambda state: state.unit))
        self._server_optimizer = ServerOptimizer(settings.server_optimizer)
        channel: ChannelPreset = settings.build("channel")
        self._channels = channel.draw(np.random.default_rng(derive(settings.seed, "channels")))
        self._queues = (0.0,) * len(self._clusters)
        self._losses: dict[int, float] = {}
        self._round: _Round | None = None

    def summary(self) -> None:
        """Nothing: the run's configuration is printed and saved by who starts it."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A ``train`` message for each unit of the round's plan."""
        plan = self._plan(server_round)
        weights = wire.unpack_tensors(arrays)
        links, sent = {}, arrays
        if self._heads is not None:
            units = [cluster.unit for cluster in plan.clusters]
            links = self._heads.open(server_round, weights, units)
            sent = wire.select_arrays(arrays, leave_out=f"{HEAD}.")
        self._round = _Round(plan, weights, {name: weights[name] for name in sent})
        timeout_s = self._settings.federation.round_timeout_s
        messages = []
        for cluster in plan.clusters:
            request = TrainRequest(server_round, cluster, timeout_s, links.get(cluster.unit))
            content, node = wire.pack_request(request, sent), self._nodes[cluster.unit]
            messages.append(Message(content, node, wire.TRAIN, group_id=str(server_round)))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model from the units that finished.

        Raises ``NonFiniteLossError`` if a unit's loss was, ``RoundFailedError`` if all failed.
        """
        now, self._round = self._round, None
        assert now is not None, "aggregate_train before configure_train"
        if self._heads is not None:
            self._heads.close()
        timeout_s = self._settings.federation.round_timeout_s
        outcomes: dict[int, TrainReply | Failure] = {
            cluster.unit: Failure("Timeout", f"no answer in {timeout_s:g} s")
            for cluster in now.plan.clusters
        }
        for message in replies:
            unit = self._units[message.metadata.src_node_id]
            outcomes[unit] = self._outcome(unit, message, now)
        finished = {u: o for u, o in outcomes.items() if isinstance(o, TrainReply)}
        failures = {u: o for u, o in outcomes.items() if isinstance(o, Failure)}
        _stop_if_hopeless(server_round, finished, failures)
        self.weights = self._aggregate(finished, now)
        if self._heads is not None:
            self._heads.keep_states(finished)
        self._queues = self._next_queues(now.plan, finished)
        self.report = self._report(finished, failures, now)
        self._losses.update({unit: _mean_loss(reply) for unit, reply in finished.items()})
        metrics = MetricRecord({"train_loss": self.report.train_loss})
        return wire.pack_tensors(self.weights), metrics

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

    def _plan(self, server_round: int) -> RoundPlan:
        settings = self._settings
        request = RoundRequest(
            round=server_round,
            clusters=self._clusters,
            num_blocks=settings.model.num_blocks,
            batch_size=settings.batch_size,
            local_steps=settings.federation.local_steps,
            num_segments=settings.pipeline.num_segments,
            num_micro_batches=settings.pipeline.num_micro_batches,
            schedule=settings.pipeline.schedule,
            channels=self._channels,
            queues=self._queues,
            losses=tuple(self._losses.get(cluster.unit) for cluster in self._clusters),
        )
        rng = np.random.default_rng(derive(settings.seed, "plan", server_round))
        try:
            plan = self._planner.plan_round(request, rng)
        except InfeasibleRoundError as error:
            raise InfeasibleRoundError(f"round {server_round}: {error}") from error
        verify_plan(plan, request)
        return plan

    def _next_queues(
        self, plan: RoundPlan, finished: Mapping[int, TrainReply]
    ) -> tuple[float, ...]:
        """Who was scheduled and failed waits on; strategies without queues change none."""
        if not plan.queues:
            return self._queues
        failed = {cluster.unit for cluster in plan.clusters} - set(finished)
        return tuple(
            idle if cluster.unit in failed else queue
            for cluster, queue, idle in zip(
                self._clusters, plan.queues, plan.idle_queues, strict=True
            )
        )

    def _outcome(self, unit: int, message: Message, now: _Round) -> TrainReply | Failure:
        if message.has_error():
            return Failure("ClientApp", _one_line(str(message.error.reason)))
        try:
            reply = wire.unpack_reply(message.content)
            if isinstance(reply, Failure):
                return Failure(_one_line(reply.kind), _one_line(reply.message))
            self._check_report(unit, reply.report)
            wire.check_like(reply.weights, now.uploads, f"unit {unit}")
        except WireError as error:
            return Failure(type(error).__name__, str(error))
        return reply

    def _check_report(self, unit: int, report: ClusterReport) -> None:
        """The report is the unit's own, and the head has seen what it says."""
        seen = self._heads.target_tokens(unit) if self._heads else report.target_tokens
        steps = self._settings.federation.local_steps
        sound = (
            report.unit == unit
            and len(report.losses) == steps
            and all(map(math.isfinite, report.losses))
            and min(report.samples, report.target_tokens) > 0
            and seen == report.target_tokens
        )
        if not sound:
            raise WireError(
                f"unit {unit} reports unit {report.unit}, {len(report.losses)} steps and "
                f"{report.target_tokens} target tokens; its round had {seen or 'not ended'}"
            )

    def _aggregate(self, finished: Mapping[int, TrainReply], now: _Round) -> Tensors:
        models = [
            {**reply.weights, **(self._heads.weights(unit) if self._heads else {})}
            for unit, reply in finished.items()
        ]
        averaged = average(models, [self._weight(reply) for reply in finished.values()])
        if self._heads is not None and self._heads.shared:
            averaged.update(self._heads.common_weights())
        new = self._server_optimizer.step(now.weights, averaged)
        odd = next((name for name, tensor in new.items() if not all_finite(tensor)), None)
        if odd is not None:
            raise NonFiniteLossError(
                f"round {now.plan.round}: {odd} is NaN or infinite after the aggregation; "
                "lower optimizer.lr or server_optimizer.lr"
            )
        return new

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
        model_bytes = wire.num_bytes(now.uploads) * len(reports)
        return RoundReport(
            round=now.plan.round,
            plan=now.plan,
            queues=self._queues,
            units=tuple(finished),
            failures={unit: f"{f.kind}: {f.message}" for unit, f in failures.items()},
            train_loss=float(np.average(losses, weights=weights)),
            samples=sum(report.samples for report in reports),
            target_tokens=sum(report.target_tokens for report in reports),
            bytes_up=model_bytes + sum(report.link_bytes_up for report in reports),
            bytes_down=model_bytes + sum(report.link_bytes_down for report in reports),
            seconds={
                f"unit/{p}": sum(r.seconds.get(p, 0.0) for r in reports) / len(reports)
                for p in phases
            },
        )


def _mean_loss(reply: TrainReply) -> float:
    return sum(reply.report.losses) / len(reply.report.losses)


def _one_line(text: str) -> str:
    """A unit's words as a terminal may show them."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _stop_if_hopeless(
    round_: int, finished: Mapping[int, TrainReply], failures: Mapping[int, Failure]
) -> None:
    for failure in failures.values():
        if failure.kind == NonFiniteLossError.__name__:
            raise NonFiniteLossError(failure.message)
    if not finished:
        causes = "; ".join(f"unit {unit}: {f.kind}: {f.message}" for unit, f in failures.items())
        raise RoundFailedError(f"round {round_}: every unit failed: {causes}")
