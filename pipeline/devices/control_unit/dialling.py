"""Dial the devices of a plan at once; those that are busy for another caller again and again."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from collapipe.errors import BusyLinkError, StageError, one_line
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

    def fault(name: str) -> StageError | None:
        try:
            dial(name)
        except StageError as refused:
            return refused
        return None

    began_s, warned = time.monotonic(), set[str]()
    left = dialled = list(names)
    while dialled:
        with ThreadPoolExecutor(len(dialled)) as pool:
            tried = zip(dialled, pool.map(fault, dialled), strict=True)
        refused = {name: why for name, why in tried if why is not None}
        waited_s = time.monotonic() - began_s
        for name, why in refused.items():
            if not isinstance(busy := why.__cause__, BusyLinkError):
                raise why
            if waited_s > (hung_s if busy_s is None else busy_s):
                if busy_s is None:
                    raise why
                raise BusyDeviceError(name, str(busy)) from why
            if waited_s > _LONG_S and name not in warned:
                warned.add(name)
                _log.warning("waiting for %s: %s", name, one_line(busy))
        left = dialled = [name for name in left if name in refused or name not in dialled]
        if refused:
            if waited_s > _LONG_S:
                first = min(refused)
                left, dialled = [name for name in names if name >= first], [first]
                for name in left:
                    release(name)
            time.sleep(_BUSY_S)
            cancellation.check()
