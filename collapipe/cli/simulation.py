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

from collapipe.cli.processes import end_all
from collapipe.config.settings import PLUGIN_FOLDER
from collapipe.errors import CollaPipeError

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until a run is noticed; 1 by default
    "RAY_USAGE_STATS_ENABLED": "0",
    "TERM": "dumb",  # FORCE_COLOR would colour Flower's JSON
}
_START_SECONDS = 60.0  # a SuperLink needs 2 to 4 s
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class _Site:
    """Where one simulation lives: its FLWR_HOME and the environment of all its processes."""

    home: Path
    environment: Mapping[str, str]

    @property
    def neutral_folder(self) -> Path:
        return self.home / "empty"

    @property
    def super_link_log(self) -> Path:
        return self.home / "superlink.log"


def run_simulation(
    app_dir: Path,
    overrides: Sequence[str],
    num_units: int,
    *,
    cpus_per_unit: int = 1,
    resume: str = "",
) -> int:
    """Run the Flower app in ``app_dir`` on simulated nodes and wait for its end.

    The app's output goes to standard output as it comes. Nothing that was started is left running,
    however this function ends.

    Parameters
    ----------
    app_dir
        Folder with the app's ``pyproject.toml``, which must know the run option ``overrides``.
    overrides
        Hydra overrides; the app gets them back by ``shlex.split(run_config["overrides"])``.
        Paths in them must be absolute: the app runs in an empty folder.
    num_units
        Simulated nodes, one per control unit.
    cpus_per_unit
        CPU cores that Ray sets aside for a node while it works.
    resume
        Checkpoint that the app's run goes on from; none: a new run.

    Returns
    -------
    int
        0 if the ServerApp came to its end, 1 if it failed.

    Raises
    ------
    CollaPipeError
        Flower could not be started, refused the app, or was ended from outside.
    KeyboardInterrupt
        The ServerApp was told to stop and everything was cleaned up, in about 6 s.
    """
    with _site() as site, _super_link(site):
        config = run_config(overrides) + (f' resume="{resume}"' if resume else "")
        run_id = _submit(site, app_dir, config, num_units, cpus_per_unit)
        _stream_log(site, run_id)
        status = _final_status(site, run_id)
    return 0 if status == "finished:completed" else 1


def run_config(overrides: Sequence[str]) -> str:
    r"""Return the value of ``flwr run --run-config`` that carries Hydra overrides unharmed.

    Flower cuts the value into pairs at the first ``"``, escaped or not, and reads each as TOML:
    so the quotes inside are written ``\u0022``, and DEL, which TOML alone forbids, ``\u007f``.

    Raises
    ------
    CollaPipeError
        An override holds bytes that are not UTF-8.
    """
    text = shlex.join(overrides)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CollaPipeError(f"the overrides are not UTF-8: {text!a}") from error
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    inner = inner.replace('\\"', "\\u0022").replace("\x7f", "\\u007f")
    return f'overrides="{inner}"'


# ── the place and the SuperLink ──────────────────────────────────────────────────────────────────


@contextmanager
def _site() -> Iterator[_Site]:
    """Yield a fresh FLWR_HOME; end every process that knows it, then remove it."""
    home = Path(tempfile.mkdtemp(prefix="collapipe-flwr-"))
    site = _Site(home, _environment(home))
    try:
        site.neutral_folder.mkdir()
        yield site
    finally:
        end_all(home)
        shutil.rmtree(home, ignore_errors=True)


def _environment(home: Path) -> dict[str, str]:
    """Return this process' environment for Flower: quiet, offline, and with its own commands."""
    defaults = {
        "FLWR_LOG_LEVEL": "ERROR",  # of Flower itself; all lines of the app come
        "PYTHONWARNINGS": "ignore:Tip:FutureWarning",  # Ray's, about GPUs
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # Ray's ports listen on every address of the machine: only who has the token is heard.
    ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    direct = {name: _with_loopback(os.environ.get(name)) for name in ("no_proxy", "NO_PROXY")}
    return {
        **defaults,
        **os.environ,
        **_QUIET,
        **ray,
        **direct,
        PLUGIN_FOLDER: str(Path.cwd()),
        "FLWR_HOME": str(home),
        "PATH": path,
    }


def _with_loopback(hosts: str | None) -> str:
    return f"{hosts},127.0.0.1" if hosts else "127.0.0.1"


@contextmanager
def _super_link(site: _Site) -> Iterator[None]:
    """Run a SuperLink in simulation mode, its records in memory, as Flower's default connection."""
    port = _free_port()
    (site.home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = "flower-superlink --insecure --simulation --isolation subprocess --host 127.0.0.1"
    with (
        site.super_link_log.open("wb") as log,
        _popen(site, [*command.split(), "--port", str(port)], log, log) as process,
    ):
        try:
            _wait_until_open(process, port, site.super_link_log)
            yield
        finally:
            end_all(site.home, process.pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
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


def _popen(
    site: _Site, command: Sequence[str], stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a Flower command out of reach of the terminal's Ctrl-C, which is ours to handle."""
    program = shutil.which(command[0], path=site.environment["PATH"])
    if program is None:
        raise CollaPipeError(
            f"the command {command[0]} was not found; pip install 'flwr[simulation]'"
        )
    return subprocess.Popen(  # noqa: S603 - Flower's own commands, no shell
        [program, *command[1:]],
        cwd=site.neutral_folder,
        env=site.environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


# ── Flower's command line ────────────────────────────────────────────────────────────────────────


def _submit(site: _Site, app_dir: Path, config: str, num_units: int, cpus_per_unit: int) -> str:
    """Start the run with this run configuration and return its id."""
    nodes = f"num-supernodes={num_units} client-resources-num-cpus={cpus_per_unit}"
    options = ["--federation-config", nodes, "--run-config", config]
    answer = _flwr(site, "run", str(app_dir.resolve()), *options)
    return str(answer["run-id"])


def _final_status(site: _Site, run_id: str) -> str:
    """Return the run's status, once it has ended: the log may break off before that."""
    while True:
        answer = _flwr(site, "list", "--run-id", run_id)
        status = str(answer["runs"][0]["status"])
        if status.startswith("finished"):
            return status
        time.sleep(1.0)


def _flwr(site: _Site, *arguments: str) -> dict[str, Any]:
    """Return what ``flwr ARGUMENTS --format json`` answers; it exits with 0 on errors, too."""
    command = ["flwr", *arguments, "--format", "json"]
    with _child(_popen(site, command, subprocess.PIPE, subprocess.STDOUT)) as process:
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
    unbuffered = _Site(site.home, {**site.environment, "PYTHONUNBUFFERED": "1"})
    with _child(_popen(unbuffered, command, subprocess.PIPE, subprocess.DEVNULL)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(b"Using SuperLink:"):  # Flower's command, not the app
                print(line.decode(errors="replace"), end="", flush=True)


@contextmanager
def _child(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Wait for the process; kill it if the block is left by an exception."""
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
