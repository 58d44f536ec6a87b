"""Processes that our commands start: their environment, and that they end with their starter."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

DIRECT = {"no_proxy": "*", "NO_PROXY": "*"}
"""Environment of a process that reaches every machine without a proxy."""
_LOOPBACK = "localhost", "127.0.0.1", "::1"
_LOOK_S = 0.2  # between looks whether the parent is still there


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` changed so that a user's other tools do not change what we start.

    Nothing on this machine is reached through a proxy, Ray joins no other cluster, and Matplotlib
    draws without a display. Proxies for other machines stay, since models and data may come
    through them.
    """
    direct = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    if "*" not in direct:
        direct = ",".join(filter(None, [direct, *_LOOPBACK]))
    own = {"no_proxy": direct, "NO_PROXY": direct, "RAY_ADDRESS": "local", "MPLBACKEND": "agg"}
    if find_spec("socksio") is None:  # httpx then fails at any SOCKS proxy, even if it uses none
        proxies = {name: value for name, value in environ.items() if _ends_in_proxy(name)}
        own |= {name: "" for name, value in proxies.items() if value.lower().startswith("socks")}
    return {**environ, **own}


def _ends_in_proxy(name: str) -> bool:
    return name.lower().endswith("_proxy")


def child_command(*arguments: str) -> Sequence[str]:
    """Command line of ``collapipe ARGUMENTS`` as a child that ends with this process.

    Python's option ``-P`` keeps it from importing files of the current folder as modules.
    """
    return [sys.executable, "-P", "-m", "collapipe.cli.child", str(os.getpid()), *arguments]


@contextmanager
def ending(processes: Collection[subprocess.Popen[Any]], wait_s: float) -> Iterator[None]:
    """Terminate ``processes``, also those added meanwhile, when the context ends, and kill each one
    that goes on for ``wait_s`` after that."""
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


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when process ``parent``, which has started it, has ended, however
    it has."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)  # which also ends what the thread waits for

    threading.Thread(target=watch, daemon=True, name="parent").start()
