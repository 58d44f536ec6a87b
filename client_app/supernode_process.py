"""``python -m client_app.supernode_process PARENT OPTIONS…``: run Flower's SuperNode, which ends
with the process PARENT and polls for messages every 0.5 s instead of Flower's 3 s.

Flower has no option for this interval, so the name ``time`` in its loop is replaced.
"""

import sys
import time
from types import SimpleNamespace

from flwr.supernode import fleet_http_client, start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

from collapipe.process.children import end_with_parent
from collapipe.wire.flower_waits import wait_briefly

_POLL_S = 0.5
_BEAT_S = 20.0  # heartbeat timeout; with Flower's 5 s a unit on a busy machine counts as absent


def _sleep(seconds: float) -> None:
    time.sleep(min(seconds, _POLL_S))


def main() -> None:
    """Run until the parent ends or a signal arrives."""
    end_with_parent(int(sys.argv.pop(1)))
    wait_briefly()
    assert hasattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT")  # fails if Flower has changed
    setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", _BEAT_S)  # noqa: B010 - a module
    setattr(start_client_internal, "time", SimpleNamespace(sleep=_sleep))  # noqa: B010 - a module
    flower_supernode()


if __name__ == "__main__":
    main()
