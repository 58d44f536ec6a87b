"""Dial the devices of a plan at once; those that are busy for another caller again and again."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from collapipe.errors import BusyLinkError, StageError, one_line
from collapipe.process import cancellation

_BUSY_S = 0.2  # pause between attempts to dial a busy device
_WARN_AFTER_S = 2.0  # after which the user is told that a device is busy
_log = logging.getLogger(__name__)


class BusyDeviceError(BusyLinkError):
    """A device served another caller for longer than the cluster's ``busy_s``."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(cause)
        self.device = device


def dial_all(
    names: Sequence[str], dial: Callable[[str], object], hung_s: float, busy_s: float | None
) -> None:
    """Call ``dial`` for all devices at once; it raises ``StageError`` if one does not answer.

    Busy ones, such as those of a cancelled round, are dialled again for ``busy_s`` seconds, after
    which ``BusyDeviceError`` is raised; None: for ``hung_s``, after which one is lost.
    """

    def fault(name: str) -> StageError | None:
        try:
            dial(name)
        except StageError as refused:
            return refused
        return None

    began_s, warned = time.monotonic(), set[str]()
    while names:
        with ThreadPoolExecutor(len(names)) as pool:
            tried = zip(names, pool.map(fault, names), strict=True)
        refused = {name: why for name, why in tried if why is not None}
        for name, why in refused.items():
            if not isinstance(busy := why.__cause__, BusyLinkError):
                raise why
            waited_s = time.monotonic() - began_s
            if waited_s > (hung_s if busy_s is None else busy_s):
                if busy_s is None:
                    raise why
                raise BusyDeviceError(name, str(busy)) from why
            if waited_s > _WARN_AFTER_S and name not in warned:
                warned.add(name)
                _log.warning("waiting for %s: %s", name, one_line(busy))
        if names := list(refused):
            time.sleep(_BUSY_S)
            cancellation.check()
