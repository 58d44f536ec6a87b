"""Units that reply at once without training, to test how a server handles replies."""

from typing import cast

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app
from client_app.node import keep_groups, kept_groups, number_of, settings_of
from collapipe.report import ClusterReport
from collapipe.state import ClusterState
from collapipe.wire import records
from collapipe.wire.messages import RESIDUAL, EvaluateReply, Trained, TrainReply, TrainRequest

UNTRAINED = "decoder.mode=control_unit", "evaluation.where=units"
"""Options of a run without a head or an evaluation on the server."""
TOKENS = 10  # per sample


class ScriptedUnits:
    """A ClientApp that uses the real app for rows and clusters, and if it ``evaluates``, for
    evaluations.

    In a round, each unit adds ``MOVED`` to each weight and reports losses of 1. It keeps its last
    change of one weight, and adds that change again in the next round.
    """

    MOVED = 0.01

    def __init__(self, evaluates: bool = False) -> None:
        self._evaluates, self._states = evaluates, dict[int, ClusterState]()

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind == records.TRAIN:
            return Message(self._trained(message, context), reply_to=message)
        if kind == records.EVALUATE and not self._evaluates:
            none = EvaluateReply(number_of(context), None)
            return Message(records.pack_evaluation(none), reply_to=message)
        reply = app(message, context)
        if kind == records.STATE:
            state_reply = records.unpack_state(reply.content)
            self._states[state_reply.unit] = cast(ClusterState, state_reply.state)
        return reply

    def _trained(self, message: Message, context: Context) -> RecordDict:
        unit = number_of(context)
        settings, request = settings_of(context), records.unpack(TrainRequest, message.content)
        assert request.link is None, "no head learns on the server: add the options UNTRAINED"
        sent = records.unpack_record(message.content, records.WEIGHTS)
        steps = settings.federation.local_steps
        samples = steps * settings.batch_size
        report = ClusterReport(
            unit=unit,
            losses=(1.0,) * steps,
            samples=samples,
            target_tokens=TOKENS * samples,
            squared_norms=(1.0,) * steps,
        )
        moved = {
            name: each + self.MOVED if each.is_floating_point() else each
            for name, each in sent.items()
        }
        name = min(sent)
        further = kept_groups(context).get(RESIDUAL, {name: torch.zeros_like(sent[name])})[name]
        moved[name] = moved[name] + further
        keep_groups(context, {RESIDUAL: {name: moved[name] - sent[name]}})
        context.state.update(records.pack(Trained(request.round)))
        return records.pack_reply(TrainReply(moved, report, self._states[unit]))


def scripted_units(evaluates: bool = False) -> ClientApp:
    """Return the units of a new run."""
    return cast(ClientApp, ScriptedUnits(evaluates))
