"""Processes that commands start: their environment, and how they end with their parent."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

DIRECT = {"no_proxy": "*", "NO_PROXY": "*"}
"""Environment of a process that uses no proxy for any machine."""
_LOOPBACK = "localhost", "127.0.0.1", "::1"
_LOOK_S = 0.2  # between checks whether the parent still runs


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without settings of other tools that would affect our processes.

    No proxy is used for this machine, Ray joins no other cluster, and Matplotlib draws without a
    display. Proxies for other machines stay, because models and data may need them.
    """
    direct = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    if "*" not in direct:
        hosts = [*filter(None, direct.split(",")), *_LOOPBACK]
        direct = ",".join(dict.fromkeys(hosts))  # a child's child has them already
    own = {"no_proxy": direct, "NO_PROXY": direct, "RAY_ADDRESS": "local", "MPLBACKEND": "agg"}
    if find_spec("socksio") is None:  # else httpx fails for any SOCKS proxy
        proxies = ((k, v) for k, v in environ.items() if k.lower().endswith("_proxy"))
        own |= {name: "" for name, value in proxies if value.lower().startswith("socks")}
    return {**environ, **own}


@contextmanager
def ending(processes: Collection[subprocess.Popen[Any]], wait_s: float) -> Iterator[None]:
    """Terminate ``processes`` when the context ends, and kill those that run ``wait_s`` longer.

    Processes may be added until then.
    """
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def end_with_parent(parent: int, within_s: float | None = None) -> None:
    """Send this process SIGTERM once its ``parent`` process has ended for any reason, and SIGKILL
    if it still runs ``within_s`` later."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)  # also interrupts waiting calls
        if within_s is not None:
            time.sleep(within_s)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent").start()
