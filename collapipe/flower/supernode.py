"""``python -m collapipe.flower.supernode PARENT OPTIONS…`` runs Flower's SuperNode.

It ends with the process PARENT, and polls for messages every 0.5 s instead of Flower's 3 s. Flower
has no option for this interval, so the name ``time`` in its loop is replaced.
"""

import sys
import time
from types import SimpleNamespace

from flwr.supernode import fleet_http_client, start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from collapipe.flower.runtime import wait_briefly
from collapipe.process.children import end_with_parent

_POLL_S = 0.5
_BEAT_S = 20.0  # heartbeat timeout; with Flower's 5 s a unit on a busy machine counts as absent


def _sleep(seconds: float) -> None:
    time.sleep(min(seconds, _POLL_S))


def patch() -> None:
    """Replace Flower's intervals in this process."""
    wait_briefly()
    setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", _BEAT_S)  # noqa: B010 - a module
    setattr(start_client_internal, "time", SimpleNamespace(sleep=_sleep))  # noqa: B010 - a module


def main() -> None:
    """Run until the parent ends or a signal arrives."""
    end_with_parent(int(sys.argv.pop(1)))
    patch()
    flower_supernode()


if __name__ == "__main__":
    main()
