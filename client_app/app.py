"""The ClientApp's message handlers: they unpack a message, call the control unit and pack its
reply."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app import node
from client_app.arrival import message_taken
from client_app.control_unit import activation_memory
from client_app.round import MaskInputs, RoundInputs, run_round
from collapipe import owner
from collapipe.errors import CollaPipeError, WireError, one_line
from collapipe.process import cancellation
from collapipe.process.cancellation import cancellable
from collapipe.process.torch_device import use_threads
from collapipe.runs.rows import report_rows
from collapipe.secure_aggregation.messages import (
    KeysReply,
    KeysRequest,
    MaskRequest,
    Roster,
    SharesReply,
    Signed,
    SurvivorsRequest,
    UnmaskRequest,
)
from collapipe.secure_aggregation.signing import sign, strangers
from collapipe.secure_aggregation.unit import (
    LastMasked,
    MaskedUnit,
    UnitWithKeys,
    UnitWithShares,
    UnitWithSurvivors,
)
from collapipe.wire import messages, records
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest

app = ClientApp()
_log = logging.getLogger(__name__)
Handler = Callable[[Message, Context], Message]


def _answering(answer: Callable[[Message, Context], RecordDict]) -> Handler:
    """Reply with the content that ``answer`` returns, or with the failure that it raises."""

    @functools.wraps(answer)
    def reply(message: Message, context: Context) -> Message:
        try:
            content = answer(message, context)
        except Exception as raised:
            error = owner.error_for_server(raised, context.node_config)
            if not isinstance(error, CollaPipeError):
                raise
            _log.info("%s: %s", message.metadata.message_type, error)
            content = records.pack(messages.Failure(type(error).__name__, one_line(error)))
        return Message(content, reply_to=message)

    return reply


@app.query("rows")
@_answering
def rows(message: Message, context: Context) -> RecordDict:
    """Summarise the unit's training rows for the server."""
    request = records.unpack(messages.RowsRequest, message.content)
    settings = node.received(request.settings, context)
    context.state.update(records.pack(request))
    report = report_rows(settings, node.number_of(context), request.words)
    return records.pack(replace(report, name=owner.name_of(context.node_config)))


@app.query("state")
@_answering
def state(message: Message, context: Context) -> RecordDict:
    """Store the run's setup. Returns the cluster's state, and the names of frozen parts that this
    machine lacks."""
    setup = records.unpack(messages.Setup, message.content)
    settings = node.received(setup.settings, context)
    if owner.has_owner(context.node_config):  # the server may send an invalid tokeniser
        node.try_tokenizer(setup.tokenizer)
    context.state.update(records.pack(setup))
    unit = node.unit_of(context, settings)
    lacking = node.fixed_parts(context, settings, unit).lacking()
    name = owner.name_of(context.node_config)
    unit.recall_times(node.kept_groups(context))
    return records.pack_state(unit.state(), lacking, name)


@app.query("frozen")
@_answering
def frozen(message: Message, context: Context) -> RecordDict:
    """Store frozen parts of the model on disk, for this run and later ones."""
    expected = node.setup_of(context).frozen
    for part, tensors in records.unpack_groups(message.content).items():
        if digest(tensors) != expected.get(part):
            raise WireError(f"the frozen part {part[:80]!r} is not the one that was announced")
        FrozenStore(default_folder()).add(tensors)
    return records.pack_groups({})


@app.query("keep")
@_answering
def keep(message: Message, context: Context) -> RecordDict:
    """Return the unit's state between rounds for a checkpoint. If updates are masked, this excludes
    state that depends on gradients, such as the optimiser's."""
    settings = node.settings_of(context)
    if not settings.federation.checkpoint_every:  # a lying server would receive gradients' moments
        raise WireError("was asked for a checkpoint, but federation.checkpoint_every=0")
    masked = settings.privacy.secure_aggregation
    names, kept = messages.NOT_TRAINED if masked else messages.KEPT, node.kept_groups(context)
    return records.pack_groups({key: kept[key] for key in names if kept.get(key)})


@app.query("restore")
@_answering
def restore(message: Message, context: Context) -> RecordDict:
    """Replace the unit's state between rounds by its state at a checkpoint."""
    groups = records.unpack_groups(message.content)
    settings = node.settings_of(context)
    allowed = messages.NOT_TRAINED if settings.privacy.secure_aggregation else messages.KEPT
    if not groups.keys() <= {*allowed}:
        raise WireError(f"only {', '.join(allowed)} can be restored")
    if activations := groups.keys() & set(messages.ACTIVATIONS):
        unit = node.unit_of(context, settings)
        for key in activations:
            activation_memory(unit, groups[key])  # raises if they do not fit
    node.keep_groups(context, groups)
    context.state.pop(messages.Trained.__name__, None)
    return records.pack_groups({})


@app.query("mask_keys")
@_answering
def mask_keys(message: Message, context: Context) -> RecordDict:
    """Make the keys for a masked sum. Raises ``WireError`` if an update was already masked for this
    round or a later one."""
    node.checked_account(context, node.settings_of(context))
    request, state = records.unpack(KeysRequest, message.content), context.state
    if LastMasked.__name__ in state and request.round <= records.unpack(LastMasked, state).round:
        raise WireError(f"an update was masked for round {request.round} already, or a later one")
    stage = UnitWithKeys.new(node.number_of(context), context.run_id, request.round)
    records.keep_stage(stage, state)
    signed: Signed | None = None
    if (key := owner.signing_key(context.node_config)) is not None:
        signed = sign(key, stage.run, stage.round, stage.unit, stage.public)
    return records.pack(KeysReply(stage.unit, stage.public, signed))


@app.query("mask_shares")
@_answering
def mask_shares(message: Message, context: Context) -> RecordDict:
    """Share the secrets of a masked sum with the other units, if its owner's peers signed their
    keys."""
    stage = records.take_stage(UnitWithKeys, context.state)
    roster, peers = records.unpack(Roster, message.content), owner.peers_of(context.node_config)
    if peers is not None and (refused := strangers(roster, stage.unit, peers)):
        units = ", ".join(map(str, refused))
        _log.warning("round %d: no peer signed the keys of unit %s", stage.round, units)
        return records.pack(SharesReply(stage.unit, {}, {}, refused))
    least_units = owner.least_units_of(context.node_config)
    shared, reply = stage.share(roster, node.settings_of(context).privacy.threshold, least_units)
    records.keep_stage(shared, context.state)
    return records.pack(reply)


@app.query("survivors")
@_answering
def survivors(message: Message, context: Context) -> RecordDict:
    """Confirm the list of survivors of a masked sum to the other survivors."""
    stage = records.take_stage(MaskedUnit, context.state)
    next_stage, reply = stage.confirm(records.unpack(SurvivorsRequest, message.content))
    records.keep_stage(next_stage, context.state)
    return records.pack(reply)


@app.query("unmask")
@_answering
def unmask(message: Message, context: Context) -> RecordDict:
    """Reveal shares of units' secrets once; the unit deletes its copies."""
    stage = records.take_stage(UnitWithSurvivors, context.state)
    return records.pack(stage.reveal(records.unpack(UnmaskRequest, message.content)))


@app.train()
@_answering
@message_taken()
def train(message: Message, context: Context) -> RecordDict:
    """Run a round, and keep the state from which the next one starts."""
    settings = node.settings_of(context)
    account = node.checked_account(context, settings)
    request = records.unpack(messages.TrainRequest, message.content)
    if request.link is not None:
        if not settings.server_has_heads:  # a lying server would receive activations and targets
            raise WireError("received a link to a head on the server, but heads are on units")
        request = replace(request, link=owner.trusted_link(request.link, context.node_config))
    weights = records.unpack_record(message.content, "weights")
    head_state = records.unpack_head_state(message.content)
    masks = None
    if settings.privacy.secure_aggregation:
        head_state = {}  # one from a lying server could make other units' updates vanish
        stage = records.take_stage(UnitWithShares, context.state)
        terms = records.masked_terms(node.setup_of(context), request.clip_norm, weights)
        masks = MaskInputs(stage, records.unpack(MaskRequest, message.content), terms)
    use_threads(settings.pipeline.threads, settings.computing_at_once)
    with cancellable(request.timeout_s):
        unit = node.unit_of(context, settings)
        fixed = node.fixed_parts(context, settings, unit)
        kept = node.kept_groups(context)
        inputs = RoundInputs(request, weights, fixed, head_state, kept, masks)
        done = run_round(unit, inputs)
        cancellation.check()  # a cancelled round must not change the state
        if account is not None:
            account.charge(settings.privacy)
        node.keep_groups(context, done.kept)
    if done.masked is not None:
        records.keep_stage(done.masked, context.state)
        context.state.update(records.pack(LastMasked(request.round)))
    context.state.update(records.pack(messages.Trained(request.round)))
    return records.pack_reply(done.reply)


@app.evaluate()
@_answering
def evaluate(message: Message, context: Context) -> RecordDict:
    """Evaluate the server's model on the unit's own rows."""
    request = records.unpack(messages.EvaluateRequest, message.content)
    weights = records.unpack_record(message.content, "weights")
    settings = node.settings_of(context)
    if not settings.evaluation.on_units:  # a lying server would learn figures of the unit's rows
        raise WireError(f"was asked to evaluate, but evaluation.where={settings.evaluation.where}")
    use_threads(settings.pipeline.threads, settings.computing_at_once)
    with cancellable(request.timeout_s):
        unit = node.unit_of(context, settings)
        found = unit.evaluate(request.split, weights, node.fixed_parts(context, settings, unit))
    return records.pack_evaluation(messages.EvaluateReply(unit.number, found))
