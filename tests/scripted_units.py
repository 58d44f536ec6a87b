"""Units that train nothing and reply in no time, for tests of what a server makes of replies."""

from typing import cast

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app
from collapipe.config import load
from collapipe.report import ClusterReport
from collapipe.state import ClusterState
from collapipe.wire import records
from collapipe.wire.messages import EvaluateReply, TrainReply, TrainRequest

UNTRAINED = "decoder.mode=control_unit", "evaluation.where=units"
"""The options of such a run: no head learns on the server, and nothing is evaluated."""
TOKENS = 10  # of each sample


class ScriptedUnits:
    """A ClientApp. Rows and clusters are those of the real one.

    In a round every unit adds ``MOVED`` to each weight, and reports losses of 1.
    """

    MOVED = 0.01

    def __init__(self) -> None:
        self._states = dict[int, ClusterState]()

    def __call__(self, message: Message, context: Context) -> Message:
        kind, unit = message.metadata.message_type, int(context.node_config["partition-id"])
        if kind == records.TRAIN:
            return Message(self._trained(message, context, unit), reply_to=message)
        if kind == records.EVALUATE:
            return Message(records.pack_evaluation(EvaluateReply(unit, None)), reply_to=message)
        reply = app(message, context)
        if kind == records.STATE:
            self._states[unit] = cast(ClusterState, records.unpack_state(reply.content).state)
        return reply

    def _trained(self, message: Message, context: Context, unit: int) -> RecordDict:
        settings, request = load(context.run_config), records.unpack(TrainRequest, message.content)
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
        return records.pack_reply(TrainReply(moved, report, self._states[unit]))


def scripted_units() -> ClientApp:
    """Units of a new run."""
    return cast(ClientApp, ScriptedUnits())
