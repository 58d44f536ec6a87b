"""A grid that looks for replies as often as the round is short.

Flower's own grids look every 0.1 s (simulated) or every 3 s (deployed), however short a round is.
"""

import time
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 3.0
_SHARE = 0.05  # of the time waited so far: the most that looking late adds to a round


class PromptGrid(Grid):
    """``inner``, with replies noticed within a twentieth of the time that they took."""

    def __init__(self, inner: Grid) -> None:
        self._inner = inner

    def set_run(self, run: Run) -> None:
        """See ``Grid``."""
        self._inner.set_run(run)

    @property
    def run(self) -> Run:
        """See ``Grid``."""
        return self._inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See ``Grid``."""
        return self._inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See ``Grid``."""
        return self._inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See ``Grid``."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See ``Grid``."""
        return self._inner.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See ``Grid``."""
        waiting, replies = set(self.push_messages(messages)), list[Message]()
        began = time.monotonic()
        while True:
            came = list(self.pull_messages(waiting))
            replies += came
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            waited_s = time.monotonic() - began
            if not waiting or (timeout is not None and waited_s >= timeout):
                return replies
            pause_s = min(max(_FIRST_PAUSE_S, _SHARE * waited_s), _LAST_PAUSE_S)
            time.sleep(pause_s if timeout is None else min(pause_s, timeout - waited_s))
