"""A grid that runs Flower's apps in this process."""

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Self

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from collapipe.own_packages import error_of_plugin
from collapipe.process.cancellation import cancellable
from collapipe.wire import kept_file

_log = logging.getLogger(__name__)
_RUN_ID, _SERVER_NODE_ID = 1, 1
_APP_ERROR = 0  # Flower's code
_GRACE_S = 5.0  # time for cancelled units to reach their next action


class InlineGrid(Grid):
    """Calls ``client_app`` for each node. A node keeps its state and handles one message at a time.

    At most ``cores`` nodes work at once, which bounds the memory. Only the last 2 · ``cores`` of a
    call all do, so that no core is idle while they end. None: all nodes work at once.

    Tensors of that state are in files, which are removed when the context ends. A node that has not
    answered before the timeout is cancelled: its work ends at the next action. If it ignores the
    cancellation, its daemon thread continues and the node stays busy.
    """

    run = Run.create_empty(_RUN_ID)

    def __init__(self, client_app: ClientApp, num_nodes: int, cores: int | None = None) -> None:
        # Message() reads these; Flower sets them only in processes that it starts.
        TaskIdentity.task_id, TaskIdentity.run_id = 1, _RUN_ID
        TaskIdentity.node_id = _SERVER_NODE_ID
        self._client_app, self._cores = client_app, cores or num_nodes
        self._kept = kept_file.new_folder()
        self._contexts = dict[int, Context]()  # by node
        for unit, node_id in enumerate(range(2, num_nodes + 2)):
            own: UserConfig = {"partition-id": unit, "num-partitions": num_nodes}
            own[kept_file.IN_NODE] = str(self._kept.path)
            self._contexts[node_id] = Context(
                run_id=_RUN_ID,
                node_id=node_id,
                node_config=own,
                state=RecordDict(),
                run_config={},
            )
        self._busy = set[int]()  # nodes that handle a message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._kept.close()

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def _unused(self, *_: Any, **__: Any) -> Any:
        """Stand for a method of ``Grid`` that the server does not call."""
        raise NotImplementedError

    set_run = create_message = push_messages = pull_messages = _unused

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies within ``timeout`` seconds; the other nodes are cancelled."""
        waiting, replies = deque(messages), list[Future[Message]]()
        deadline = None if timeout is None else time.monotonic() + timeout
        with cancellable() as scope:
            try:
                while waiting:
                    working = [reply for reply in replies if not reply.done()]
                    last = len(waiting) + len(working) <= 2 * self._cores
                    if last or len(working) < self._cores:
                        replies.append(self._start(waiting.popleft()))
                    elif not wait(working, _left_s(deadline), FIRST_COMPLETED).done:
                        break
                wait(replies, _left_s(deadline))
            finally:
                late = [reply for reply in replies if not reply.done()]
                scope.cancel()
                wait(late, _GRACE_S)
        # A cancelled unit's reply is too late, even if it arrived by now.
        return [reply.result() for reply in replies if reply not in late]

    def _start(self, message: Message) -> "Future[Message]":
        node_id, reply = message.metadata.dst_node_id, Future[Message]()
        if node_id in self._busy:
            error = Error(_APP_ERROR, "still busy with an earlier round, which did not end")
            reply.set_result(Message(error, reply_to=message))
        else:
            self._busy.add(node_id)
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._call, message, reply),
                name=f"unit-{self._contexts[node_id].node_config['partition-id']}",
                daemon=True,
            ).start()
        return reply

    def _call(self, message: Message, reply: "Future[Message]") -> None:
        node_id = message.metadata.dst_node_id
        try:
            answer = self._client_app(message, self._contexts[node_id])
        except BaseException as error:  # every message needs a reply
            _log.debug("a unit raised", exc_info=True)
            answer = Message(Error(_APP_ERROR, _reason(error)), reply_to=message)
        self._busy.remove(node_id)
        reply.set_result(answer)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    try:
        own = error_of_plugin(error) if isinstance(error, Exception) else None
        return own or f"{name}: {error}"
    except Exception as other:  # an error without a text, or a folder that cannot be read
        return f"{name}, without its text ({type(other).__name__})"
