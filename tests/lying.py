"""Units that train as requested but send back other weights."""

from collections.abc import Callable, Collection

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.app import app as client_app
from collapipe.tensors import Tensors
from collapipe.wire import records

Lie = Callable[[Tensors, Tensors], Tensors]
"""A function from received and trained weights to the weights that a unit sends."""


class Lying:
    """A ClientApp that replaces the weights that ``units`` send back; by default, it runs the real
    one."""

    def __init__(self, lie: Lie, units: Collection[int], app: ClientApp = client_app) -> None:
        self._lie, self._units, self._app = lie, units, app

    def __call__(self, message: Message, context: Context) -> Message:
        lies = context.node_config["partition-id"] in self._units
        if message.metadata.message_type != records.TRAIN or not lies:
            return self._app(message, context)
        sent = records.unpack_record(message.content, "weights")
        reply = self._app(message, context)
        if reply.has_content():
            trained = records.unpack_record(reply.content, "weights")
            reply.content["weights"] = records.pack_tensors(self._lie(sent, trained))
        return reply
