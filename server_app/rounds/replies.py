"""Check a unit's reply to a round, and optionally add the noise of its uplink (Lemma 2).

An invalid reply excludes its unit from the round and affects no other unit.
"""

import math
from dataclasses import dataclass, replace

import torch
from flwr.app import Message, RecordDict

from collapipe.config import Settings
from collapipe.errors import WireError, is_printable
from collapipe.models.part import state_like
from collapipe.models.split import HEAD
from collapipe.plan import ClusterPlan
from collapipe.report import TRACED_STEPS, ClusterReport
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Tensors
from collapipe.wire import records
from collapipe.wire.compression.codec import check_like, expected, restore
from collapipe.wire.messages import Failure, TrainReply
from optim.planner import RoundRequest
from optim.round.convergence import interference_error
from server_app import questions
from server_app.questions import Question, answered
from server_app.roster import SILENT
from server_app.rounds.kept import SENDER, check_state

_MOST_PHASES, _LONGEST = 32, 64  # characters of a phase's name
_MOST_NORM, _MOST_LOSS = 1e100, 1e12  # of averages that stay finite and readable
_MOST_S = 1e7  # of a phase: four months
_ACTIONS = 2  # per micro-batch and segment: forward and backward


@dataclass(frozen=True, slots=True)
class Job:
    """A unit's part of a round."""

    plan: ClusterPlan
    weights: Tensors  # that the unit receives
    head_state: Tensors  # of the optimiser of a head that the unit trains
    expected: Tensors | None  # no values, shaped like the reply; None: the unit returns the weights
    question: Question[TrainReply]  # with the largest allowed size of the reply
    message: Message  # to the unit's node


def received(
    message: Message | None,
    job: Job,
    seen: int | None,
    request: RoundRequest,
    settings: Settings,
    timeout_s: float,
) -> TrainReply | Failure:
    """Return a unit's reply with its weights restored, or the reason why it cannot be used.

    ``seen`` counts the target tokens on which the unit's head on the server was trained. It is 0
    unless the head saw all steps, and None if the unit has no head on the server.
    """
    if message is None:
        return Failure(SILENT, f"no answer in {timeout_s:g} s")
    plan = job.plan

    def whole(content: RecordDict) -> TrainReply:
        reply = records.unpack_reply(content)
        upload = settings.compression.of(plan.uplink).upload
        check_report(reply.report, plan.unit, seen, settings)
        check_traces(reply.report, most_traced(plan, request))
        head = _sent_head(plan, job.weights, settings)
        check_state(reply.head_state, head, settings.optimizer)
        if job.expected is not None:
            check_like(reply.weights, job.expected, SENDER)
            return reply
        return replace(reply, weights=restore(reply.weights, job.weights, upload, SENDER))

    reply = answered(message, replace(job.question, unpack=whole))
    factor = settings.federation.channel_noise
    if isinstance(reply, Failure) or not factor:
        return reply
    constant_w = settings.channel.interference_constant_w
    variance = noise_variance(plan, request, constant_w, factor)
    seed = derive(settings.seed, "channel_noise", request.round, plan.unit)
    return replace(reply, weights=with_noise(reply.weights, variance, seed))


def question_of(
    plan: ClusterPlan,
    request: RoundRequest,
    sent: Tensors,
    settings: Settings,
    masked: Tensors | None,
) -> Question[TrainReply]:
    """Return the question of a unit's round, with the size of its largest reply. ``masked`` has
    the meaning of ``Job.expected``."""
    upload = settings.compression.of(plan.uplink).upload
    weights = expected(sent, upload) if masked is None else masked
    heads = state_like(settings.optimizer, _sent_head(plan, sent, settings))
    arrays = {records.WEIGHTS: weights, records.HEAD_STATE: heads}
    sizes = {name: questions.tensors_bytes(tensors) for name, tensors in arrays.items()}
    return questions.train(request.local_steps, most_traced(plan, request), sizes)


def trained(message: Message) -> bool:
    """Whether the unit trained, so that the state that it keeps includes this round."""
    return message.has_content() and Failure.__name__ not in message.content


def _sent_head(plan: ClusterPlan, sent: Tensors, settings: Settings) -> Tensors:
    """The ``sent`` head weights whose optimiser state the unit returns; empty if no head was sent
    or if the head always stays on the unit."""
    moves = settings.chooses_heads and settings.unit_has_head(plan.uplink)
    return {name: each for name, each in sent.items() if moves and name.startswith(f"{HEAD}.")}


def check_report(report: ClusterReport, unit: int, seen: int | None, settings: Settings) -> None:
    """Raise ``WireError`` unless the report names ``unit`` and its figures are possible. ``seen``
    has the meaning it has in ``received``."""
    steps = settings.federation.local_steps
    counted = seen is None or seen == report.target_tokens
    if report.unit != unit or len(report.losses) != steps or not counted:
        raise WireError(
            f"reported unit {report.unit}, {len(report.losses)} steps and "
            f"{report.target_tokens} target tokens, expected unit {unit}, {steps} steps"
            + (f" and {seen} target tokens" if seen is not None else "")
        )
    most_samples = steps * settings.batch_size
    possible = (
        0 < report.samples <= most_samples
        and 0 < report.target_tokens <= most_samples * settings.task.max_length
        and 0 <= report.input_tokens <= most_samples * settings.task.max_length
        and 0 <= report.stem_rows <= most_samples
        and all(abs(loss) < _MOST_LOSS for loss in report.losses)
        and len(report.squared_norms) == len(report.losses)
        and all(0 <= norm < _MOST_NORM for norm in report.squared_norms)
        and len(report.seconds) <= _MOST_PHASES
        and all(len(phase) <= _LONGEST and is_printable(phase) for phase in report.seconds)
        and all(0 <= seconds < _MOST_S for seconds in report.seconds.values())
        and all(0 <= sent < 2**62 for sent in (report.link_bytes_up, report.link_bytes_down))
    )
    if not possible:
        raise WireError(
            "reported losses, samples, tokens, phases, seconds or bytes that are impossible "
            "for its round"
        )


def most_traced(plan: ClusterPlan, request: RoundRequest) -> int:
    """Return the most actions that a unit can trace in a round, with its embedding and head.

    The bound does not depend on which devices hold segments, because the server may not know which
    devices are real.
    """
    devices = len(_cluster(plan, request).devices)  # more than blocks may share a segment
    steps = min(request.local_steps, TRACED_STEPS)
    return (devices + 2) * steps * plan.num_micro_batches * _ACTIONS


def check_traces(report: ClusterReport, most: int) -> None:
    """Raise ``WireError`` for more than ``most`` traced actions."""
    traced = sum(len(actions) for device in report.traces for actions in device.steps)
    if traced > most:
        raise WireError(f"reported {traced:,} actions of devices, expected at most {most:,}")


def noise_variance(
    plan: ClusterPlan, request: RoundRequest, constant_w: float, factor: float
) -> float:
    """Return the variance of each weight's noise: ``factor``·ε(p), ε(p) = C/(p·h + I), eq. (25).

    C is ``constant_w``. The variance is 0 if the plan has no channel, because p and h are unknown.
    """
    cluster = _cluster(plan, request)
    if plan.uplink is None or cluster.uplink is None:
        return 0.0
    gain = cluster.uplink.gains[plan.uplink.channel]
    interference_w = request.channels[plan.uplink.channel].interference_w
    error = interference_error(plan.uplink.power_w, gain, interference_w, constant_w)
    return factor * float(error)


def with_noise(weights: Tensors, variance: float, seed: int) -> Tensors:
    """Add independent Gaussian noise of mean 0 to the floating-point weights."""
    generator, deviation = torch.Generator().manual_seed(seed), math.sqrt(variance)
    noisy = dict(weights)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            noisy[name] = tensor + deviation * noise
    return noisy


def _cluster(plan: ClusterPlan, request: RoundRequest) -> ClusterState:
    return next(each for each in request.clusters if each.unit == plan.unit)
