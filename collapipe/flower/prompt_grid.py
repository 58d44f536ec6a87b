"""Make Flower's grids notice replies soon, and attribute each to its node."""

import time
from collections.abc import Iterable

from flwr.app import Error, Message
from flwr.serverapp import Grid

from collapipe.flower.pulling import Replies

_NODE_UNAVAILABLE = 5  # Flower's code
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 3.0
_SHARE = 0.05  # a polling pause is at most this share of the time waited so far


def make_prompt(grid: Grid) -> Grid:
    """Make ``grid`` detect a reply within 5 % of the time waited, and attribute it to its node.

    Flower's grids poll every 0.1 s (simulated) or 3 s (deployed), even in a short round. If a node
    has left or cannot be reached, Flower sends an error in its own name, or nothing.
    """
    coming = Replies.of(grid)
    pull = grid.pull_messages if coming is None else coming.pull

    def send_and_receive(
        messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked, replies = list(messages), list[Message]()
        ids: list[str | None] = [*grid.push_messages(asked)] or [None] * len(asked)
        waiting = {key: each for key, each in zip(ids, asked, strict=True) if key is not None}
        error = Error(_NODE_UNAVAILABLE, "Flower could not send the message to the node")
        replies += [
            Message(error, reply_to=each)
            for key, each in zip(ids, asked, strict=True)
            if key is None
        ]
        began = time.monotonic()
        waited_s = 0.0
        while True:
            last = timeout is not None and waited_s >= timeout
            for reply in pull(list(waiting)) if waiting else ():
                request = waiting.pop(reply.metadata.reply_to_message_id, None)
                if request is None:
                    continue  # a reply to an earlier question
                gone = reply.has_error()
                replies.append(Message(reply.error, reply_to=request) if gone else reply)
            if not waiting or last:
                if coming is not None:
                    coming.forget(waiting)
                return replies
            waited_s = time.monotonic() - began
            pause_s = min(max(_FIRST_PAUSE_S, _SHARE * waited_s), _LAST_PAUSE_S)
            time.sleep(pause_s if timeout is None else min(pause_s, max(timeout - waited_s, 0.0)))
            waited_s = time.monotonic() - began

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid
