"""A unit in a deployed federation: Flower's SuperNode beside this process, which answers its
messages.

Flower would start a process for every message and run in it what the server has sent as code. Here
the installation of the unit's owner answers, in one process that keeps what is expensive to make,
and what the server sends is options and weights alone. The SuperNode hands messages out by its
Runtime API, on this machine, to who knows the secret that it was started with; how that is done is
Flower's own and no published interface: this file alone knows of it.
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
_CHANGING = records.STATE, records.RESTORE, records.TRAIN  # messages after which more is kept
_PAUSE_S = 0.3  # between questions whether there is a message


@dataclass(frozen=True)
class Messages:
    """Those that a SuperNode has for this unit. ``address`` is that of its Runtime API; what the
    unit keeps between them outlasts the SuperNode's memory in ``kept``."""

    address: str
    secret: bytes = field(repr=False)
    kept: KeptStore

    def answer(self, app: ClientApp) -> None:
        """Answer one after another with ``app``, for good."""
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
                pass  # a SuperNode that has ended is started again
            except (Exception, SystemExit):  # else the unit would be online and never answer
                _log.exception("takes the next message after an unexpected error")
            time.sleep(_PAUSE_S)

    def _answer_one(self, app: ClientApp, token: str) -> None:
        """Or say that there is no answer: the SuperNode takes no other message before."""
        with self._task(token) as client:
            try:
                # The last of these is the server's code, which is not used.
                message, context, run, _ = pull_task_input(client)
                kind = message.metadata.message_type
                if not context.state:  # as after a restart
                    context.state.update(records.pack_kept(*self.kept.read(context.run_id)))
                go_back(self.kept, message, context)
                reply = _answered(app, message, context, f"{run.fab_id} {run.fab_version}")
                seconds, failed = time.perf_counter() - taken_s(), _has_failed(reply)
                answered = None if failed else records.content_bytes(reply.content)
                count_message(kind, seconds, records.content_bytes(message.content), answered)
                more = ", failed" if failed else ""
                if kind == records.TRAIN and not failed:
                    report = records.unpack(records.UnitReply, reply.content).report
                    assert report is not None  # as the answer to a round has one
                    count_round(report)
                    more = f", the first micro-batch after {report.seconds[START]:.2f} s"
                _log.info("%s: %.1f s%s", kind, seconds, more)
                if kind in _CHANGING and not failed:
                    kept = records.unpack_kept(context.state)
                    self.kept.write(context.run_id, *kept, after_round=kind == records.TRAIN)
                push_message(client, reply, context)
                push_task_output(client, context, SubStatus.COMPLETED, "")
            except BaseException as error:
                # Such as after a minute's sleep of the machine, when it has been given up.
                _log.warning("a message is not answered: %s", one_line(error))
                push_task_output(client, None, SubStatus.FAILED, "not answered")

    @contextmanager
    def _task(self, token: str) -> Iterator[RuntimeHttpClient]:
        """The SuperNode for one message; it takes us for alive meanwhile."""
        client = self._client(
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        )
        beat = make_task_heartbeat_fn_http(client)

        def beat_while_wanted() -> bool:
            with suppress(httpx.HTTPStatusError):  # given up: who pushes the reply hears it
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
    """Forget a round whose answer did not arrive: the unit was killed before it had sent it, or it
    was lost on the way. What the server does not know either is forgotten, too."""
    arrived, last = records.arrived_round(message.content), records.trained_round(context.state)
    if arrived in (None, last):
        return
    before = records.pack_kept(*kept.go_back(context.run_id))
    known = records.trained_round(before) == arrived
    how = "goes back to" if known else "begins afresh, for it has not what it kept after"
    _log.info("the server has no answer to round %d: the unit %s round %d", last, how, arrived)
    # the server may have told another setup since, and have begun a masked sum of this round
    later = {name: context.state[name] for name in records.OF_NO_ROUND if name in context.state}
    context.state.clear()
    if known:
        context.state.update(before)
    context.state.update(later)


def _has_failed(reply: Message) -> bool:
    return reply.has_error() or Failure.__name__ in reply.content


def _answered(app: ClientApp, message: Message, context: Context, sender: str) -> Message:
    """The reply of ``app``, or why there is none: without the words of errors, which may have
    values of the owner's in them."""
    own = f"{_APP} {collapipe.__version__}"
    if sender != own:
        reason = f"the unit has {own}, the run is of {sender}; install the same version"
    else:
        try:
            return app(message, context)
        except BaseException as error:  # a library's panic, too, or its sys.exit
            _log.exception("the unit failed")
            reason = f"{type(error).__name__}; the unit's log says more"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
