"""Flower's Runtime API: a client, heartbeats of a task, and the messages of a SuperNode.

A SuperNode provides messages on this machine to any process that knows the secret with which it was
started.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    pull_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

_FIRST_S = 0.05  # each further wait is twice as long
_TRIES = 5  # of a request
_UNAVAILABLE = httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def wait_briefly() -> None:
    """Set Flower's first wait for a part of a message to 0.05 s in this process.

    Flower delivers a message before all of its parts have arrived. It has no option for the first
    wait, so the default arguments of its functions are replaced.
    """
    for pull in (pull_objects, pull_and_inflate_object_from_tree):
        defaults = pull.__kwdefaults__
        assert defaults is not None  # a test fails if Flower changes this
        defaults["initial_backoff"] = _FIRST_S


def connect(
    address: str,
    component: str,
    *interceptors: ProtobufClientInterceptor,
    insecure: bool = True,
    root_certificates: bytes | None = None,
) -> RuntimeHttpClient:
    """Return a client that repeats a request if its connection, unused for a while, was closed.

    Flower's own client also sends this process SIGINT if a token has expired.
    """
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=insecure,
        root_certificates=root_certificates,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
        retry_invoker=RetryInvoker(
            lambda: exponential(max_delay=1), httpx.TransportError, max_tries=_TRIES, max_time=None
        ),
    )


@contextmanager
def beating(client: RuntimeHttpClient) -> Iterator[None]:
    """Send heartbeats of the client's task. One that does not arrive is sent again, with longer and
    longer waits. If the server refuses the heartbeat, it also refuses the next request."""

    def send_heartbeat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPStatusError as error:
            return error.response.status_code not in _UNAVAILABLE
        except httpx.HTTPError:
            return False  # Flower sends it again
        return True

    heart = HeartbeatSender(send_heartbeat)
    heart.start()
    try:
        yield
    finally:
        heart.stop()


@dataclass(frozen=True, slots=True)
class Task:
    """A message of the SuperNode. The SuperNode waits for ``answer`` or ``fail`` before the next
    message."""

    client: RuntimeHttpClient

    def pull(self) -> tuple[Message, Context, str]:
        """Return the message, its context, and the app and version that sent it."""
        # The last result is the server's code, which is not used.
        message, context, run, _ = pull_task_input(self.client)
        return message, context, f"{run.fab_id} {run.fab_version}"

    def answer(self, reply: Message, context: Context) -> None:
        push_message(self.client, reply, context)
        push_task_output(self.client, context, SubStatus.COMPLETED, "")

    def fail(self) -> None:
        """Report that there is no answer, unless the SuperNode has ended."""
        with suppress(httpx.HTTPError):
            push_task_output(self.client, None, SubStatus.FAILED, "not answered")


class Tasks:
    """The messages of the SuperNode whose Runtime API has this ``address`` and ``secret``."""

    def __init__(self, address: str, secret: bytes) -> None:
        auth = SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods=frozenset({_ACQUIRE})
        )
        self._address, self._client = address, connect(address, "SuperExec", auth)

    def next_token(self) -> str:
        """Return the token of the next message; empty if there is none, or no SuperNode runs."""
        wanted = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        try:
            return str(self._client.AcquireTask(wanted).token)
        except httpx.HTTPError:  # if the SuperNode has ended, another process restarts it
            return ""

    @contextmanager
    def task(self, token: str) -> Iterator[Task]:
        """Open the message with this ``token``, and send heartbeats to the SuperNode meanwhile."""
        client = connect(self._address, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))
        with closing(client), beating(client):
            yield Task(client)


def error_reply(message: Message, reason: str) -> Message:
    """Return the error with which a ClientApp that raises replies to a ``message``."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
