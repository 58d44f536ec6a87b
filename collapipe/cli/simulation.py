"""``flwr run`` on Flower's simulation engine: one private SuperLink, waited for, then gone.

Left to itself, ``flwr run`` starts a detached SuperLink which stays up, is shared by every checkout
on the machine and imports its clients from the folder in which it was started.  Here each run has a
SuperLink of its own, in a temporary folder, on a free port of 127.0.0.1::

    this process ── flower-superlink ── flower-superexec ── flwr-simulation ── Ray's processes
                                                            (ServerApp)        (ClientApps)

Each of these starts a session of its own, and some outlive their parent; all of them inherit
``FLWR_HOME``, the temporary folder, and are found by it.
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from collapipe.config.settings import PLUGIN_FOLDER
from collapipe.errors import CollaPipeError

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until a run is noticed; 1 by default
    "PYTHONUNBUFFERED": "1",  # flwr log prints each line when it comes
    "RAY_USAGE_STATS_ENABLED": "0",
    "TERM": "dumb",  # FORCE_COLOR would colour Flower's JSON
}
_START_SECONDS = 60.0  # a SuperLink needs 2 to 4 s
_GRACE_SECONDS = 15.0  # an interrupted simulation runs its exit handlers, then 5 s at most
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Site:
    """Where one simulation lives: its FLWR_HOME and the environment of all its processes."""

    home: Path
    environment: Mapping[str, str]


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
    config = run_config(overrides) + (f' resume="{resume}"' if resume else "")
    options = ["--federation-config", nodes, "--run-config", config]
    with _site() as site, _super_link(site):
        run_id = str(_flwr(site, "run", str(app_dir.resolve()), *options)["run-id"])
        _stream_log(site, run_id)
        status = ""
        while not status.startswith("finished"):  # the log may break off before that
            time.sleep(1.0 if status else 0.0)
            status = str(_flwr(site, "list", "--run-id", run_id)["runs"][0]["status"])
    return status == "finished:completed"


def run_config(overrides: Sequence[str]) -> str:
    r"""Return the value of ``flwr run --run-config`` that carries Hydra overrides unharmed.

    Flower cuts the value into pairs at the first ``"``, escaped or not, and reads each as TOML:
    so the quotes inside are written ``\u0022``, and DEL, which TOML alone forbids, ``\u007f``.

    Raises ``CollaPipeError`` where an override holds bytes that are not UTF-8.
    """
    text = shlex.join(overrides)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CollaPipeError(f"the overrides are not UTF-8: {text!a}") from error
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    inner = inner.replace('\\"', "\\u0022").replace("\x7f", "\\u007f")
    return f'overrides="{inner}"'


@contextmanager
def _site() -> Iterator[_Site]:
    """A fresh FLWR_HOME and an environment that is quiet, offline, and has our own commands; on
    leaving every process that knows it ends, then it is removed."""
    home = Path(tempfile.mkdtemp(prefix="collapipe-flwr-"))
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    direct = {
        name: ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        for name in ("no_proxy", "NO_PROXY")
    }
    environment = {
        "FLWR_LOG_LEVEL": "ERROR",  # of Flower itself; all lines of the app come
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray would hide GPUs, and warn that it does
        **os.environ,
        **_QUIET,
        # Ray's ports listen on every address of the machine: only who has the token is heard.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **direct,
        PLUGIN_FOLDER: str(Path.cwd()),
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join(path),
    }
    try:
        (home / "empty").mkdir()
        yield _Site(home, environment)
    finally:
        end_all(home)
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _super_link(site: _Site) -> Iterator[None]:
    """Run a SuperLink in simulation mode, its records in memory, as Flower's default connection."""
    port, log = _free_port(), site.home / "superlink.log"
    (site.home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = "flower-superlink --insecure --simulation --isolation subprocess --host 127.0.0.1"
    with (
        log.open("wb") as written,
        _process(site, [*command.split(), "--port", str(port)], written, written) as process,
    ):
        try:
            _wait_until_open(process, port, log)
            yield
        finally:
            end_all(site.home, process.pid)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CollaPipeError(
                f"flower-superlink ended with status {process.returncode}: "
                f"{_last_line(log.read_text(errors='replace'))}"
            )
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(_POLL_SECONDS)
    raise CollaPipeError(f"flower-superlink did not open port {port} within {_START_SECONDS:.0f} s")


@contextmanager
def _process(
    site: _Site, command: Sequence[str], stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Flower command out of reach of the terminal's Ctrl-C, which is ours to handle; wait for
    it, or kill it if the block is left by an exception."""
    program = shutil.which(command[0], path=site.environment["PATH"])
    if program is None:
        raise CollaPipeError(
            f"the command {command[0]} was not found; pip install 'flwr[simulation]'"
        )
    with (
        subprocess.Popen(  # noqa: S603 - Flower's own commands, no shell
            [program, *command[1:]],
            cwd=site.home / "empty",
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        ) as process
    ):
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _flwr(site: _Site, *arguments: str) -> dict[str, Any]:
    """What ``flwr ARGUMENTS --format json`` answers; it exits with 0 on errors, too."""
    command = ["flwr", *arguments, "--format", "json"]
    with _process(site, command, subprocess.PIPE, subprocess.STDOUT) as process:
        output = process.communicate()[0].decode(errors="replace")
    with suppress(ValueError):
        answer = json.loads(output)
        if answer.get("success"):
            return dict(answer)
        output = str(answer.get("error-message", output))
    raise CollaPipeError(f"flwr {arguments[0]} failed: {_last_line(output)}")


def _stream_log(site: _Site, run_id: str) -> None:
    """Copy the run's output, line by line, to standard output until the run has ended."""
    command = ["flwr", "log", run_id, "--stream"]
    with _process(site, command, subprocess.PIPE, subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(b"Using SuperLink:"):  # Flower's command, not the app
                print(line.decode(errors="replace"), end="", flush=True)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def end_all(home: Path, root: int | None = None) -> None:
    """End ``root`` and everything that descends from it or has ``home`` as its FLWR_HOME.

    The simulation first, as ``flwr stop`` would but at once: SIGINT runs Flower's exit handlers.
    (Its SIGTERM belongs to Ray, which would run none.)  Whoever outstays the time of grace or
    a second Ctrl-C is killed.
    """
    family = ProcessFamily(home, root)
    try:
        family.signal(signal.SIGINT, "flwr-simulation")
        family.signal(signal.SIGTERM, "flower-superlink")
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
        deadline = time.monotonic() + _GRACE_SECONDS
        asked: set[psutil.Process] = set()
        while (targets := self.named(name)) and time.monotonic() < deadline:
            for process in targets - asked:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
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
