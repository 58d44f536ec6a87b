"""Units that do as they are told, and say that their weights are others."""

from collections.abc import Callable, Collection

from flwr.app import Context, Message

from client_app.app import app as client_app
from collapipe.tensors import Tensors
from collapipe.wire import records

Lie = Callable[[Tensors, Tensors], Tensors]
"""What is sent back, of the weights that a unit got and those that it trained."""


class Lying:
    """The real ClientApp, but for the weights that these units send back."""

    def __init__(self, lie: Lie, units: Collection[int]) -> None:
        self._lie, self._units = lie, units

    def __call__(self, message: Message, context: Context) -> Message:
        lies = context.node_config["partition-id"] in self._units
        if message.metadata.message_type != records.TRAIN or not lies:
            return client_app(message, context)
        sent = records.unpack_record(message.content, "weights")
        reply = client_app(message, context)
        if reply.has_content():
            trained = records.unpack_record(reply.content, "weights")
            reply.content["weights"] = records.pack_tensors(self._lie(sent, trained))
        return reply
