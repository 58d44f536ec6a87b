"""A unit in a deployed federation: this process answers the messages of Flower's SuperNode.

Flower would start a process for each message, and run code from the server in it. Here the owner's
installation answers in one process, which caches expensive objects. The server only sends options
and weights.

The SuperNode provides messages on this machine through its Runtime API, which requires the secret
with which it was started. This interface of Flower is not published; only this file uses it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

import collapipe
from client_app.arrival import message_taken, taken_s
from client_app.figures import count_message, count_round
from client_app.kept_store import KeptStore
from collapipe.errors import one_line
from collapipe.report import START
from collapipe.wire import records
from collapipe.wire.flower_waits import a_few_tries, wait_briefly
from collapipe.wire.messages import Failure

_log = logging.getLogger(__name__)
_APP = "collapipe/collapipe"
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_CHANGING = records.STATE, records.RESTORE, records.TRAIN  # messages that change the unit's state
_PAUSE_S = 0.3  # pause between polls for a message


@dataclass(frozen=True)
class Messages:
    """Answers the messages that a SuperNode has for this unit. ``address`` is its Runtime API.
    ``kept`` stores the unit's state, because a restart of the SuperNode loses its memory."""

    address: str
    secret: bytes = field(repr=False)
    kept: KeptStore

    def answer(self, app: ClientApp) -> None:
        """Answer messages with ``app`` one after another, without end."""
        wait_briefly()
        auth = SuperExecAuthHttpInterceptor(
            master_secret=self.secret, protected_methods=frozenset({_ACQUIRE})
        )
        client = self._client(RuntimeVersionHttpInterceptor(component_name="SuperExec"), auth)
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        while True:
            try:
                found = client.AcquireTask(wanted)
                if found.token:
                    with message_taken():
                        self._answer_one(app, found.token)
                    continue
            except httpx.HTTPError:
                pass  # another process restarts a SuperNode that has ended
            except (Exception, SystemExit):  # otherwise the unit would stay online without answers
                _log.exception("unexpected error; continues with the next message")
            time.sleep(_PAUSE_S)

    def _answer_one(self, app: ClientApp, token: str) -> None:
        """Answer one message, or report that there is no answer, because the SuperNode waits for
        one before the next message."""
        with self._task(token) as client:
            try:
                # The last result is the server's code, which is not used.
                message, context, run, _ = pull_task_input(client)
                kind = message.metadata.message_type
                if not context.state:  # after a restart
                    context.state.update(records.pack_kept(*self.kept.read(context.run_id)))
                go_back(self.kept, message, context)
                reply = _answered(app, message, context, f"{run.fab_id} {run.fab_version}")
                seconds, failed = time.perf_counter() - taken_s(), _has_failed(reply)
                answered = None if failed else records.content_bytes(reply.content)
                count_message(kind, seconds, records.content_bytes(message.content), answered)
                more = ", failed" if failed else ""
                if kind == records.TRAIN and not failed:
                    report = records.unpack(records.UnitReply, reply.content).report
                    assert report is not None  # every reply to a round has a report
                    count_round(report)
                    more = f", the first micro-batch after {report.seconds[START]:.2f} s"
                _log.info("%s: %.1f s%s", kind, seconds, more)
                if kind in _CHANGING and not failed:
                    kept = records.unpack_kept(context.state)
                    self.kept.write(context.run_id, *kept, after_round=kind == records.TRAIN)
                push_message(client, reply, context)
                push_task_output(client, context, SubStatus.COMPLETED, "")
            except BaseException as error:
                # For example, the SuperNode gives up the message if the machine sleeps a minute.
                _log.warning("a message was not answered: %s", one_line(error))
                push_task_output(client, None, SubStatus.FAILED, "not answered")

    @contextmanager
    def _task(self, token: str) -> Iterator[RuntimeHttpClient]:
        """Open a client for one message, and send heartbeats to the SuperNode meanwhile."""
        client = self._client(
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        )
        beat = make_task_heartbeat_fn_http(client)

        def beat_while_wanted() -> bool:
            with suppress(httpx.HTTPStatusError):  # pushing the reply reports the same error
                return beat()
            return True

        heart = HeartbeatSender(beat_while_wanted)
        heart.start()
        try:
            yield client
        finally:
            heart.stop()
            client.close()

    def _client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=True,  # on this machine
            root_certificates=None,
            interceptors=list(interceptors),
            retry_invoker=a_few_tries(),
        )


def go_back(kept: KeptStore, message: Message, context: Context) -> None:
    """Undo a round whose answer did not reach the server, because the unit was killed or the answer
    was lost. If the state before that round is not stored, all state is dropped."""
    arrived, last = records.arrived_round(message.content), records.trained_round(context.state)
    if arrived in (None, last):
        return
    before = records.pack_kept(*kept.go_back(context.run_id))
    known = records.trained_round(before) == arrived
    how = "restores its state of" if known else "drops its state, as it did not store that of"
    _log.info("the server has no answer to round %d: the unit %s round %d", last, how, arrived)
    # the server may have sent a new setup since, and have begun a masked sum of this round
    later = {name: context.state[name] for name in records.OF_NO_ROUND if name in context.state}
    context.state.clear()
    if known:
        context.state.update(before)
    context.state.update(later)


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
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
