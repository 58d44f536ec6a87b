"""``python -m collapipe.flower.supernode PARENT OPTIONS…`` runs Flower's SuperNode.

It ends with the process PARENT, and polls for messages every 0.5 s instead of Flower's 3 s. Flower
has no option for this interval, so the name ``time`` in its loop is replaced.

If a run ends before all parts of a message have arrived, the message's task is ended. Flower 1.41
drops the message alone, and the unit would wait more than an hour for its parts.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_client, start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from collapipe.flower.runtime import wait_briefly
from collapipe.process.children import end_with_parent

_POLL_S = 0.5
_HEARTBEAT_S = 20.0  # timeout; with Flower's 5 s a unit on a busy machine counts as absent


def _sleep(seconds: float) -> None:
    time.sleep(min(seconds, _POLL_S))


def _pull(*arguments: Any, **options: Any) -> dict[str, bytes]:
    """Pull a message's parts; the end of the run is an ``Exception``, which ends the task."""
    try:
        return pull_objects(*arguments, **options)
    except RunNotRunningException as over:
        raise RuntimeError("the run has ended") from over


def patch() -> None:
    """Replace Flower's intervals in this process, and its way to pull a message's parts."""
    wait_briefly()
    setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", _HEARTBEAT_S)  # noqa: B010 - a module
    setattr(start_client_internal, "time", SimpleNamespace(sleep=_sleep))  # noqa: B010 - a module
    setattr(start_client_internal, "pull_objects", _pull)  # noqa: B010 - a module


def main() -> None:
    """Run until the parent ends or a signal arrives."""
    end_with_parent(int(sys.argv.pop(1)))
    patch()
    flower_supernode()


if __name__ == "__main__":
    main()
