"""The ClientApp's message handlers, thin: unpack, call the control unit, pack."""

import functools
import logging
import threading
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.control_unit import ControlUnit
from collapipe import cancellation, config
from collapipe.cancellation import cancellable
from collapipe.config import Settings
from collapipe.errors import CollaPipeError, WireError
from collapipe.models.part import prefixed
from collapipe.tensors import Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire import records
from collapipe.wire.compression import FLOAT32
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest
from collapipe.wire.messages import Failure, Setup
from collapipe.wire.upload import compress_update

app = ClientApp()
_reading = threading.Lock()
_log = logging.getLogger(__name__)
_SETUP = "setup"  # kept between messages, as are those that training leaves:
_OPTIMIZER, _RESIDUAL = _KEPT = "optimizer", "residual"


@app.query("state")
def state(message: Message, context: Context) -> Message:
    """Learn what the run is made of, and tell the cluster's state and what is lacking here."""
    try:
        setup = records.unpack_state_request(message.content)
        context.state[_SETUP] = records.pack_state_request(setup)["setup"]
        state = _control_unit(context).state
        return Message(records.pack_state(state, _lacking(setup)), reply_to=message)
    except CollaPipeError as error:
        return _failed(message, error)


@app.query("frozen")
def frozen(message: Message, context: Context) -> Message:
    """Keep the parts of the model that do not train, on disk and for later runs, too."""
    try:
        setup = _setup(context)
        for part, tensors in records.unpack_frozen(message.content).items():
            if digest(tensors) != setup.frozen.get(part):
                raise WireError(f"the frozen part {part[:80]!r} is not the one that was announced")
            FrozenStore(default_folder()).add(tensors)
        return Message(records.pack_done(), reply_to=message)
    except CollaPipeError as error:
        return _failed(message, error)


@app.query("keep")
def keep(message: Message, context: Context) -> Message:
    """Tell what is kept here between rounds, for a checkpoint."""
    kept = {key: tensors for key in _KEPT if (tensors := _kept(context, key))}
    return Message(records.pack_kept(kept), reply_to=message)


@app.query("restore")
def restore(message: Message, context: Context) -> Message:
    """Go on from what was kept at a checkpoint, in place of what is kept here now."""
    try:
        kept = records.unpack_kept(message.content)
        if isinstance(kept, Failure) or not kept.keys() <= set(_KEPT):
            raise WireError(f"only {', '.join(_KEPT)} can be restored")
        for key in _KEPT:
            context.state.pop(key, None)
            if key in kept:
                context.state[key] = records.pack_tensors(kept[key])
        return Message(records.pack_done(), reply_to=message)
    except CollaPipeError as error:
        return _failed(message, error)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run a round and keep the optimiser's state for the next."""
    try:
        request, weights = records.unpack_request(message.content)
        settings = config.load(context.run_config)
        torch.set_num_threads(settings.pipeline.threads)
        with cancellable(request.timeout_s):
            unit = _control_unit(context)
            precision = settings.compression.upload
            start = weights if precision == FLOAT32 else _copies(weights)
            whole = {**_frozen_weights(context), **weights}
            finished = unit.train(request, whole, _kept(context, _OPTIMIZER))
            end = {name: finished.reply.weights[name] for name in weights}
            sent, residual = compress_update(start, end, _kept(context, _RESIDUAL), precision)
            cancellation.check()  # a round that the server has given up leaves no state
    except CollaPipeError as error:
        return _failed(message, error)
    if settings.optimizer.state == "keep":
        context.state[_OPTIMIZER] = records.pack_tensors(finished.optimizer_state)
    if residual:
        context.state[_RESIDUAL] = records.pack_tensors(residual)
    return Message(records.pack_reply(replace(finished.reply, weights=sent)), reply_to=message)


def _setup(context: Context) -> Setup:
    if _SETUP not in context.state:
        raise WireError("this unit knows nothing of the run yet; ask it for its state first")
    return records.unpack_state_request(context.state)


def _control_unit(context: Context) -> ControlUnit:
    unit = int(context.node_config["partition-id"])
    return _cached_unit(config.load(context.run_config), unit, _setup(context).tokenizer)


def _lacking(setup: Setup) -> list[str]:
    absent = FrozenStore(default_folder()).lacks(setup.frozen.values())
    return [part for part, name in setup.frozen.items() if name in absent]


def _frozen_weights(context: Context) -> Tensors:
    with _reading:  # units of one process share what is read
        return _cached_weights(tuple(_setup(context).frozen.items()))


@functools.lru_cache(maxsize=1)  # of the run that the process serves, for all its units and rounds
def _cached_weights(parts: tuple[tuple[str, str], ...]) -> Tensors:
    store = FrozenStore(default_folder())
    named = [prefixed(part, store.load(name)) for part, name in parts]
    return {name: tensor for tensors in named for name, tensor in tensors.items()}


@functools.lru_cache(maxsize=64)  # a process may serve many units, and each many rounds
def _cached_unit(settings: Settings, unit: int, tokenizer: str) -> ControlUnit:
    return ControlUnit(settings, unit, Tokenizer.unpack(tokenizer))


def _copies(tensors: Tensors) -> Tensors:
    """For training changes weights where they are."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _kept(context: Context, key: str) -> Tensors:
    """Tensors of the unit's last round."""
    if isinstance(context.state.get(key), ArrayRecord):
        return records.unpack_record(context.state, key)
    return {}


def _failed(message: Message, error: CollaPipeError) -> Message:
    _log.info("round not finished: %s", error)
    content: RecordDict = records.pack_failure(error)
    return Message(content, reply_to=message)
