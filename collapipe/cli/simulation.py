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

from collapipe.errors import CollaPipeError

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_START_SECONDS = 60.0  # a SuperLink needs 2 to 4 s
_GRACE_SECONDS = 8.0  # Flower's processes leave by force 5 s after a signal
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
    app_dir: Path, overrides: Sequence[str], num_units: int, *, cpus_per_unit: int = 1
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

    Returns
    -------
    int
        0 if the ServerApp came to its end, 1 if it failed.

    Raises
    ------
    CollaPipeError
        Flower could not be started, refused the app, or was ended from outside.
    KeyboardInterrupt
        After the run was told to stop and everything was cleaned up.
    """
    with _site() as site, _super_link(site):
        run_id = _submit(site, app_dir, overrides, num_units, cpus_per_unit)
        try:
            _stream_log(site, run_id)
            status = _final_status(site, run_id)
        except KeyboardInterrupt:
            with suppress(CollaPipeError):
                _flwr(site, "stop", run_id, "--format", "json")
            raise
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
        _end_all(home)
        shutil.rmtree(home, ignore_errors=True)


def _environment(home: Path) -> dict[str, str]:
    """Return this process' environment for Flower: quiet, offline, and with its own commands."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PATH": path}


@contextmanager
def _super_link(site: _Site) -> Iterator[None]:
    """Run a SuperLink in simulation mode, with its records in memory, as Flower's default one."""
    port = _free_port()
    (site.home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        f'[superlink.local]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    command = "flower-superlink --insecure --simulation --isolation subprocess --host 127.0.0.1"
    with site.super_link_log.open("wb") as log:
        process = _popen(site, [*command.split(), "--port", str(port)], stdout=log)
    try:
        _wait_until_open(process, port, site.super_link_log)
        yield
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
