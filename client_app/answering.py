"""Answer the messages of a SuperNode in a deployed federation.

Flower would start a process for each message, and run code from the server in it. Here the owner's
installation answers in one process, which caches expensive objects. The server only sends options
and weights.
"""

import logging
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from prometheus_client import Counter, Gauge, Summary

import collapipe
from client_app.arrival import message_taken, taken_s
from client_app.kept_store import KeptStore
from collapipe.errors import one_line
from collapipe.flower.runtime import Task, Tasks, error_reply, wait_briefly
from collapipe.report import START, ClusterReport
from collapipe.wire import records
from collapipe.wire.messages import Failure

_log = logging.getLogger(__name__)
_APP = "collapipe/collapipe"
_CHANGING = records.STATE, records.RESTORE, records.TRAIN  # messages that change the unit's state
_PAUSE_S = 0.3  # pause between polls for a message
# figures of the unit's messages and rounds for Prometheus
_SECONDS = Summary("collapipe_message_seconds", "Seconds per message.", ["kind", "outcome"])
_PHASES = Counter("collapipe_phase_seconds", "Seconds of the phases of rounds.", ["phase"])
_BYTES = Counter("collapipe_bytes", "Bytes of weights, activations and gradients.", ["way"])
_DEVICES = Gauge("collapipe_devices", "Real devices that took part in the last round.")


def answer_messages(tasks: Tasks, kept: KeptStore, app: ClientApp) -> None:
    """Answer a SuperNode's messages for this unit with ``app`` one after another, without end.

    ``kept`` stores the unit's state, because a restart of the SuperNode loses its memory.
    """
    wait_briefly()
    while True:
        try:
            if token := tasks.next_token():
                with message_taken(), tasks.task(token) as task:
                    _answer_one(task, kept, app)
                continue
        except (Exception, SystemExit):  # otherwise the unit would stay online without answers
            _log.exception("unexpected error; continues with the next message")
        time.sleep(_PAUSE_S)


def _answer_one(task: Task, kept: KeptStore, app: ClientApp) -> None:
    """Answer one message, or report that there is no answer."""
    try:
        message, context, sender = task.pull()
        if not context.state:  # after a restart
            context.state.update(records.pack_kept(*kept.read(context.run_id)))
        go_back(kept, message, context)
        reply = _answered(app, message, context, sender)
        _count(message, reply)
        if message.metadata.message_type in _CHANGING and not _has_failed(reply):
            after_round = message.metadata.message_type == records.TRAIN
            state = records.unpack_kept(context.state)
            kept.write(context.run_id, *state, after_round=after_round)
        task.answer(reply, context)
    except BaseException as error:
        # For example, the SuperNode gives up the message if the machine sleeps a minute.
        _log.warning("a message was not answered: %s", one_line(error))
        task.fail()


def _count(message: Message, reply: Message) -> None:
    """Log a message and its reply, and count them in the unit's figures."""
    kind, seconds = message.metadata.message_type, time.perf_counter() - taken_s()
    answered = None if _has_failed(reply) else records.content_bytes(reply.content)
    count_message(kind, seconds, records.content_bytes(message.content), answered)
    more = ", failed" if answered is None else ""
    if kind == records.TRAIN and answered is not None:
        report = records.unpack(records.UnitReply, reply.content).report
        assert report is not None  # every reply to a round has a report
        count_round(report)
        more = f", the first micro-batch after {report.seconds[START]:.2f} s"
    _log.info("%s: %.1f s%s", kind, seconds, more)


def count_message(kind: str, seconds: float, num_bytes: int, answered: int | None) -> None:
    """Add a message of ``num_bytes``. ``answered`` is the bytes of the reply, None if it failed."""
    outcome = "failed" if answered is None else "answered"
    _SECONDS.labels(kind, outcome).observe(seconds)
    _BYTES.labels("down").inc(num_bytes)
    _BYTES.labels("up").inc(answered or 0)


def count_round(report: ClusterReport) -> None:
    """Add a round's phases, link traffic and devices; ``count_message`` adds its message."""
    for phase, seconds in report.seconds.items():
        _PHASES.labels(phase).inc(seconds)
    _BYTES.labels("down").inc(report.link_bytes_down)
    _BYTES.labels("up").inc(report.link_bytes_up)
    _DEVICES.set(len(report.devices))


def go_back(kept: KeptStore, message: Message, context: Context) -> None:
    """Undo a round whose answer did not reach the server, because the unit was killed or the answer
    was lost. If the state before that round is not stored, all state is dropped."""
    arrived, last = records.arrived_round(message.content), records.trained_round(context.state)
    if arrived in (None, last):
        return
    before = records.pack_kept(*kept.go_back(context.run_id))
    known = records.trained_round(before) == arrived
    how = "goes back to that state" if known else "did not store it and begins without state"
    _log.info("state of round %d, the server expects round %d: the unit %s", last, arrived, how)
    # the server may have sent a new setup since, and have begun a masked sum of this round
    later = {name: context.state[name] for name in records.OF_NO_ROUND if name in context.state}
    context.state.clear()
    if known:
        context.state.update(before)
    context.state.update(later)
    kept.write(context.run_id, *records.unpack_kept(context.state))  # the last masked round, too


def _has_failed(reply: Message) -> bool:
    return reply.has_error() or Failure.__name__ in reply.content


def _answered(app: ClientApp, message: Message, context: Context, sender: str) -> Message:
    """Return the reply of ``app``, or an error without the exception's text, because that may
    contain the owner's data."""
    own = f"{_APP} {collapipe.__version__}"
    if sender != own:
        reason = f"the unit has {own}, the run is of {sender}; install the same version"
    else:
        try:
            return app(message, context)
        except BaseException as error:  # also panics and sys.exit of libraries
            _log.exception("the unit failed")
            reason = f"{type(error).__name__}; see the unit's log"
    return error_reply(message, reason)
