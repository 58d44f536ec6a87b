"""Send a round's jobs to the units, and check their replies."""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message

from collapipe.flower.reply_limit import expect
from collapipe.plan import ClusterPlan
from collapipe.tensors import chosen
from collapipe.wire import records
from collapipe.wire.messages import Failure, LinkAddress, TrainReply, TrainRequest
from server_app.decoding.heads import Heads
from server_app.planning.scheduler import RoundDecision
from server_app.questions import apart
from server_app.roster import SILENT
from server_app.rounds.aggregation import Aggregation
from server_app.rounds.global_model import GlobalModel
from server_app.rounds.replies import Job, question_of, received, trained
from server_app.rounds.screening import UpdateScreen
from server_app.units import Units


@dataclass(frozen=True, slots=True)
class Outbox:
    """The round's jobs, and the failures of planned units that get no job."""

    jobs: Mapping[int, Job]
    failures: Mapping[int, Failure]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The replies of the units that finished a round, and the failures of its other planned
    units."""

    finished: Mapping[int, TrainReply]
    failures: Mapping[int, Failure]


@dataclass(frozen=True)
class Exchange:
    """Exchanges the messages of a run's rounds. A unit has ``timeout_s`` seconds for a round."""

    units: Units
    model: GlobalModel
    heads: Heads
    aggregation: Aggregation
    screen: UpdateScreen
    timeout_s: float

    def prepare(self, decision: RoundDecision) -> Outbox:
        """Build a job for each planned unit that can train, and open the heads on the server."""
        plans, round_ = decision.plan.clusters, decision.plan.round
        if not plans:
            return Outbox({}, {})
        ready = self.aggregation.open(self.units, round_, [each.unit for each in plans])
        models = {each.unit: self.model.of_unit(each.unit) for each in plans}
        num_rows = {each.unit: each.num_samples for each in decision.request.clusters}
        links = self.heads.open(round_, models, plans, num_rows)
        jobs, packed = dict[int, Job](), dict[bool, ArrayRecord]()
        for plan in plans:
            if (more := ready.messages.get(plan.unit)) is not None:
                job = self._job(decision, plan, links.get(plan.unit), packed)
                job.message.content.update(more)
                jobs[plan.unit] = job
        return Outbox(jobs, ready.failures)

    def send(self, outbox: Outbox) -> dict[int, Message]:
        """Send the jobs and wait for the replies. Returns them by node."""
        jobs = outbox.jobs.values()
        expect(max((each.question.size.total_bytes for each in jobs), default=0))
        messages = [each.message for each in jobs]
        replies = self.units.grid.send_and_receive(messages, timeout=self.timeout_s)
        return {reply.metadata.src_node_id: reply for reply in replies}

    def outcomes(
        self, decision: RoundDecision, outbox: Outbox, replies: Mapping[int, Message]
    ) -> Outcomes:
        """Close the heads on the server, and separate usable replies from failures."""
        self.heads.close()
        outcomes = dict[int, TrainReply | Failure](outbox.failures)
        for unit, job in outbox.jobs.items():
            message = replies.get(self.units.nodes[unit])
            if message is not None and trained(message):
                self.units.arrived[unit] = decision.plan.round
            seen = self.heads.target_tokens(unit)
            reply = received(
                message, job, seen, decision.request, self.units.settings, self.timeout_s
            )
            silent = isinstance(reply, Failure) and reply.kind == SILENT
            outcomes[unit] = reply if silent else self.heads.failure(unit) or reply
        finished, failures = apart(outcomes)
        ends = {u: each.weights | self.heads.own_weights(u) for u, each in finished.items()}
        starts = {unit: outbox.jobs[unit].weights for unit in finished}
        failures |= self.screen.judge(ends, starts, self.model)
        finished = {u: each for u, each in finished.items() if u not in failures}
        return Outcomes(finished, failures)

    def _job(
        self,
        decision: RoundDecision,
        plan: ClusterPlan,
        link: LinkAddress | None,
        packed: dict[bool, ArrayRecord],
    ) -> Job:
        """Build the job of a unit. ``packed`` caches weights that several units receive."""
        unit, round_ = plan.unit, decision.plan.round
        has_head = self.units.settings.unit_has_head(plan.uplink)
        weights = chosen(self.model.of_unit(unit), self.model.names(has_head))
        state = self.heads.states.get(unit, {}) if has_head else {}
        if unit in self.model.own_models:
            arrays = records.pack_tensors(weights)
        else:
            if has_head not in packed:
                packed[has_head] = records.pack_tensors(weights)
            arrays = packed[has_head]
        request = TrainRequest(
            round=round_,
            plan=plan,
            timeout_s=self.timeout_s,
            link=link,
            remembered=self.heads.remembered(unit).round,
            clip_norm=self.aggregation.clip_norm,
            arrived=self.units.arrived.get(unit, 0),
        )
        content = records.pack(request, weights=arrays, **records.pack_head_state(state))
        node = self.units.nodes[unit]
        masked = self.aggregation.expected(weights)
        return Job(
            plan=plan,
            weights=weights,
            head_state=state,
            expected=masked,
            question=question_of(plan, decision.request, weights, self.units.settings, masked),
            message=Message(content, node, records.TRAIN, group_id=str(round_)),
        )
