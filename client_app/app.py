"""The ClientApp's message handlers, thin: unpack, call the control unit, pack."""

import functools
import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.control_unit import ControlUnit
from collapipe import cancellation, config, wire
from collapipe.cancellation import cancellable
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, WireError
from collapipe.tasks.tokenizer import Tokenizer

app = ClientApp()
_log = logging.getLogger(__name__)
_TOKENIZER, _OPTIMIZER = "tokenizer", "optimizer"  # what the unit keeps between messages


@app.query("state")
def state(message: Message, context: Context) -> Message:
    """Take the run's tokeniser and tell the cluster's state."""
    try:
        tokenizer = wire.unpack_state_request(message.content)
        context.state[_TOKENIZER] = ConfigRecord({"json": tokenizer})
        return Message(wire.pack_state(_control_unit(context).state()), reply_to=message)
    except CollaPipeError as error:
        return _failed(message, error)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run a round and keep the optimiser's state for the next."""
    try:
        request, weights = wire.unpack_request(message.content)
        settings = config.load(context.run_config)
        torch.set_num_threads(settings.pipeline.threads)
        with cancellable(request.timeout_s):
            unit = _control_unit(context)
            finished = unit.train(request, weights, _optimizer_state(context))
            cancellation.check()  # a round that the server has given up leaves no state
    except CollaPipeError as error:
        return _failed(message, error)
    if settings.optimizer.state == "keep":
        context.state[_OPTIMIZER] = wire.pack_tensors(finished.optimizer_state)
    return Message(wire.pack_reply(finished.reply), reply_to=message)


def _control_unit(context: Context) -> ControlUnit:
    kept = context.state.get(_TOKENIZER)
    if not isinstance(kept, ConfigRecord):
        raise WireError("this unit has no tokeniser yet; ask it for its state first")
    unit = int(context.node_config["partition-id"])
    return _cached_unit(config.load(context.run_config), unit, str(kept["json"]))


@functools.lru_cache(maxsize=64)  # a process may serve many units, and each many rounds
def _cached_unit(settings: Settings, unit: int, tokenizer: str) -> ControlUnit:
    return ControlUnit(settings, unit, Tokenizer(tokenizer))


def _optimizer_state(context: Context) -> dict[str, torch.Tensor]:
    if isinstance(context.state.get(_OPTIMIZER), ArrayRecord):
        return wire.unpack_record(context.state, _OPTIMIZER)
    return {}


def _failed(message: Message, error: CollaPipeError) -> Message:
    _log.info("round not finished: %s", error)
    content: RecordDict = wire.pack_failure(error)
    return Message(content, reply_to=message)
