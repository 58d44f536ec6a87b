"""Dial the devices of a plan at once; those that are busy for another caller again and again."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from collapipe.errors import BusyLinkError, one_line
from collapipe.process import cancellation

_BUSY_S = 0.2  # pause between attempts to dial a busy device
_LONG_S = 2.0  # after which the user is told that a device is busy, and others are released
_log = logging.getLogger(__name__)


class BusyDeviceError(BusyLinkError):
    """A device served another caller for longer than the cluster's ``busy_s``."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(cause)
        self.device = device


def dial_all(
    names: Sequence[str],
    dial: Callable[[str], object],
    release: Callable[[str], object],
    hung_s: float,
    busy_s: float | None,
) -> None:
    """Call ``dial`` for all devices at once; it raises ``StageError`` if one does not answer.

    Busy ones, such as those of a cancelled round, are dialled again for ``busy_s`` seconds, after
    which ``BusyDeviceError`` is raised; None: for ``hung_s``, after which one is lost. While one is
    busy for long, those after it in the order of names are ``released``, and dialled after it: else
    two control units could each wait for a device of the other.
    """
    began_s, warned = time.monotonic(), set[str]()
    held, in_turn = set[str](), False
    while missing := [name for name in names if name not in held]:
        dialled = [min(missing)] if in_turn else missing
        with ThreadPoolExecutor(len(dialled)) as pool:
            tries = {name: pool.submit(dial, name) for name in dialled}
        refused = {name: why for name, each in tries.items() if (why := each.exception())}
        held |= {*dialled} - refused.keys()
        waited_s = time.monotonic() - began_s
        for name, why in refused.items():
            busy = why.__cause__
            if not isinstance(busy, BusyLinkError) or (busy_s is None and waited_s > hung_s):
                raise why
            if busy_s is not None and waited_s > busy_s:
                raise BusyDeviceError(name, str(busy)) from why
            if waited_s > _LONG_S and name not in warned:
                warned.add(name)
                _log.warning("waiting for %s: %s", name, one_line(busy))
        in_turn = bool(refused) and waited_s > _LONG_S
        if in_turn:
            for name in [each for each in held if each > min(refused)]:
                held.remove(name)
                release(name)
        if refused:
            time.sleep(_BUSY_S)
            cancellation.check()
