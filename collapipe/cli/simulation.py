"""``flwr run`` on Flower's simulation engine: one private SuperLink, waited for, then gone.

Left to itself, ``flwr run`` starts a detached SuperLink which stays up, is shared by every checkout
on the machine and imports its clients from the folder in which it was started.  Here each run has a
SuperLink of its own, in a temporary folder, on a free port of 127.0.0.1::

    this process ── SuperLink ── flower-superexec ── flwr-simulation ── Ray's processes
                                                     (ServerApp)        (ClientApps)

Each of these starts a session of its own, and some outlive their parent; all of them inherit
``FLWR_HOME``, the temporary folder, and are found by it. If this process is killed, the SuperLink
notices it and ends, and the others after it.
"""

import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from collapipe.config.settings import PLUGIN_FOLDER
from collapipe.deployment.flower import Flower, free_port, run_config, wait_until_open
from collapipe.errors import ConfigError
from collapipe.temporary import TemporaryFolder
from collapipe.wire.kept_file import IN_ENVIRONMENT

_HIDE_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_GRACE_SECONDS = 15.0  # an interrupted simulation runs its exit handlers, then 5 s at most
_POLL_SECONDS = 0.1
_MOST_LETTERS = 39  # of the 107 bytes of a socket's path Ray takes 68


def run_simulation(
    app_dir: Path, overrides: Sequence[str], num_units: int, resume: str = ""
) -> bool:
    """Run the Flower app in ``app_dir`` on ``num_units`` simulated nodes; whether it succeeded.

    The app gets ``overrides`` back by ``shlex.split(run_config["overrides"])``, and ``resume``, the
    checkpoint to go on from. Paths must be absolute: it runs in an empty folder. Its output goes to
    standard output as it comes. Nothing that was started is left running, however this ends.

    Raises ``CollaPipeError`` where Flower could not be started, refused the app, or was ended from
    outside, and ``KeyboardInterrupt`` when everything is cleaned up, in about 6 s.
    """
    nodes = f"num-supernodes={num_units} client-resources-num-cpus=1"  # cores that Ray sets aside
    options = ["--federation-config", nodes, "--run-config", run_config(overrides, resume)]
    with _site() as flower, _super_link(flower):
        return flower.wait(flower.submit(app_dir, *options))


@contextmanager
def _site() -> Iterator[Flower]:
    """A fresh FLWR_HOME; on leaving every process that knows it ends, then it is removed."""
    _check_ray_folder()
    ray = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would hide GPUs, and warn that it does.
        _HIDE_GPUS: os.environ.get(_HIDE_GPUS, "0"),
        # Ray's ports listen on every address of the machine: only who has the token is heard.
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
    """Raise ``ConfigError`` if Ray's sockets cannot be in its temporary folder: Ray would wait for
    minutes."""
    names = ["RAY_TMPDIR", *(["TMPDIR"] if sys.platform == "linux" else [])]
    name = next((each for each in names if each in os.environ), None)
    folder = "/tmp" if name is None else os.environ[name]  # noqa: S108 - what Ray takes
    if not folder.isascii() or len(folder) > _MOST_LETTERS:
        raise ConfigError(
            f"{name}={folder}: Ray needs a folder of at most {_MOST_LETTERS} ASCII letters for its "
            "sockets; set RAY_TMPDIR=/tmp"
        )


@contextmanager
def _super_link(flower: Flower) -> Iterator[None]:
    """Run a SuperLink in simulation mode, its records in memory, as Flower's default connection."""
    port, log = free_port(), flower.home / "superlink.log"
    (flower.home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = [sys.executable, "-P", "-m", "server_app.superlink", str(os.getpid())]
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
    """End ``root`` and everything that descends from it or has ``home`` as its FLWR_HOME.

    The simulation first, as ``flwr stop`` would but at once: SIGINT runs Flower's exit handlers.
    (Its SIGTERM belongs to Ray, which would run none.)  Whoever outstays the time of grace or
    a second Ctrl-C is killed.
    """
    family = ProcessFamily(home, root)
    try:
        family.signal(signal.SIGINT, "flwr-simulation")
        family.signal(signal.SIGTERM, "server_app.superlink")
    finally:
        family.signal(signal.SIGKILL)


class ProcessFamily:
    """The living processes of one FLWR_HOME.

    Ray's workers overwrite their environment with their title, so that only their parents give
    them away: a process that was found once is remembered, should its parent end first.
    """

    def __init__(self, home: Path, root: int | None) -> None:
        self._home, self._root = str(home), root
        self._members: set[psutil.Process] = set()  # equal by id and time of birth

    def signal(self, number: signal.Signals, name: str = "") -> None:
        """Send a signal to the members with this command and wait until they are gone."""
        deadline = math.inf  # of a busy machine the first look alone may take longer
        asked: set[psutil.Process] = set()
        while (targets := self.named(name)) and time.monotonic() < deadline:
            for process in targets - asked:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if not asked:
                deadline = time.monotonic() + _GRACE_SECONDS
            asked |= targets
            time.sleep(_POLL_SECONDS)

    def named(self, name: str) -> set[psutil.Process]:
        """The members whose command has ``name`` in it."""
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
        return False  # somebody else's, whose environment is not ours to read
