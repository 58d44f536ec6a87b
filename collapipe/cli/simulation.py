"""Run ``flwr run`` on Flower's simulation engine, with a private SuperLink for each run.

By default, ``flwr run`` starts a detached SuperLink that keeps running. All checkouts on the
machine share it, and it imports clients from the folder in which it was started. Here each run has
a separate SuperLink, in a temporary folder and on a free port of 127.0.0.1::

    this process ── SuperLink ── flower-superexec ── flwr-simulation ── Ray's processes
                                                     (ServerApp)        (ClientApps)

Each of these processes starts a new session, and some outlive their parent. All inherit
``FLWR_HOME``, the temporary folder, by which they are found. If this process is killed, the
SuperLink notices and ends, and then the others end.
"""

import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from collapipe.config.settings import PLUGIN_FOLDER, Settings
from collapipe.errors import ConfigError
from collapipe.flower.commands import Flower, free_port, wait_until_open
from collapipe.process.folders import TemporaryFolder
from collapipe.wire.kept_file import IN_ENVIRONMENT

_HIDE_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_GRACE_SECONDS = 15.0  # an interrupted simulation runs its exit handlers and at most 5 s more
_POLL_SECONDS = 0.1
_LEAST_FREE = 2**25  # bytes; on a full disk Ray waits for a minute
_MOST_LETTERS = 39  # a socket's path has at most 107 bytes, and Ray needs 68


def run_simulation(app_dir: Path, settings: Settings, resume: str | None = None) -> bool:
    """Run the Flower app in ``app_dir`` with one simulated node for each unit; return its success.

    The app gets ``settings``, and ``resume``, the checkpoint to continue from. Paths must be
    absolute, because the app runs in an empty folder. Its output is copied to standard output. All
    started processes end with this call.

    Raises ``CollaPipeError`` if Flower cannot be started, refuses the app, or is ended from
    outside. Raises ``KeyboardInterrupt`` after an interrupt and a clean-up of about 6 s.
    """
    units = settings.federation.num_units
    nodes = f"num-supernodes={units} client-resources-num-cpus=1"  # cores that Ray reserves
    # Ray would start a process for each core, even of those without a unit
    nodes += f" init-args-num-cpus={min(units, os.cpu_count() or 1)}"
    with _site() as flower, _super_link(flower):
        return flower.wait(
            flower.submit(app_dir, settings.text, resume, "--federation-config", nodes)
        )


@contextmanager
def _site() -> Iterator[Flower]:
    """Make a new FLWR_HOME; at the end stop all processes that use it, and remove it."""
    _check_ray_folder()
    ray = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray would hide GPUs and warn about it.
        _HIDE_GPUS: os.environ.get(_HIDE_GPUS, "0"),
        # Ray's ports listen on every address of the machine, so callers need a token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with TemporaryFolder("flwr") as home:
        (kept := home / "kept").mkdir(mode=0o700)
        own = {PLUGIN_FOLDER: str(Path.cwd()), IN_ENVIRONMENT: str(kept)}
        try:
            yield Flower.at(home, {**ray, **own})
        finally:
            end_all(home)


def _check_ray_folder() -> None:
    """Raise ``ConfigError`` if Ray's folder is full or unsuitable for sockets: Ray would wait for
    minutes."""
    names = ["RAY_TMPDIR", *(["TMPDIR"] if sys.platform == "linux" else [])]
    name = next((each for each in names if each in os.environ), None)
    folder = "/tmp" if name is None else os.environ[name]  # noqa: S108 - Ray's default
    if not folder.isascii() or len(folder) > _MOST_LETTERS:
        raise ConfigError(
            f"{name}={folder}: Ray needs a folder of at most {_MOST_LETTERS} ASCII letters for its "
            "sockets; set RAY_TMPDIR=/tmp"
        )
    if Path(folder).is_dir() and (free := shutil.disk_usage(folder).free) < _LEAST_FREE:
        raise ConfigError(
            f"{folder}: {free:,} bytes are free, and Ray needs {_LEAST_FREE:,} for its records; "
            "set RAY_TMPDIR to another folder"
        )


@contextmanager
def _super_link(flower: Flower) -> Iterator[None]:
    """Run a SuperLink in simulation mode, with records in memory, as the default connection."""
    port, log = free_port(), flower.home / "superlink.log"
    (flower.home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [sys.executable, "-P", "-m", "collapipe.flower.superlink", str(os.getpid())]
    command += ["--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1"]
    with (
        log.open("wb") as written,
        flower.process([*command, "--port", str(port)], written, written) as process,
    ):
        try:
            wait_until_open(process, port, log)
            yield
        finally:
            end_all(flower.home, process.pid)


def end_all(home: Path, root: int | None = None) -> None:
    """End ``root``, its descendants, and all processes with ``home`` as FLWR_HOME.

    The simulation ends first, as with ``flwr stop`` but at once: SIGINT runs Flower's exit
    handlers. SIGTERM would be handled by Ray, which does not run them. After 15 s or a second
    Ctrl-C, remaining processes are killed.
    """
    family = ProcessFamily(home, root)
    try:
        family.signal(signal.SIGINT, "flwr-simulation")
        family.signal(signal.SIGTERM, "collapipe.flower.superlink")
    finally:
        family.signal(signal.SIGKILL)


class ProcessFamily:
    """The running processes of one FLWR_HOME.

    Ray's workers overwrite their environment with their title, so they can be found only through
    their parents. A process that was found once is remembered, in case its parent ends first.
    """

    def __init__(self, home: Path, root: int | None) -> None:
        self._home, self._root = str(home), root
        self._members: set[psutil.Process] = set()  # equal by id and start time

    def signal(self, number: signal.Signals, name: str = "") -> None:
        """Send a signal to the members with this command and wait until they are gone."""
        deadline = math.inf  # set later: on a busy machine the first search may take long
        signalled: set[psutil.Process] = set()
        while (targets := self.named(name)) and time.monotonic() < deadline:
            for process in targets - signalled:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if not signalled:
                deadline = time.monotonic() + _GRACE_SECONDS
            signalled |= targets
            time.sleep(_POLL_SECONDS)

    def named(self, name: str) -> set[psutil.Process]:
        """Return the members whose command contains ``name``."""
        found = {process for process in psutil.process_iter() if self._is_member(process)}
        for process in tuple(found):
            with suppress(psutil.NoSuchProcess):
                found |= set(process.children(recursive=True))
        self._members, named = set(), set()
        for process in found:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self._members.add(process)
                    if name in " ".join(process.cmdline()):
                        named.add(process)
        return named

    def _is_member(self, process: psutil.Process) -> bool:
        if process in self._members or process.pid == self._root:
            return True
        with suppress(psutil.Error, OSError):
            return bool(process.environ().get("FLWR_HOME") == self._home)
        return False  # another user's process; its environment is not readable
