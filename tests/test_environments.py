"""Commands on unusually configured machines: a table of environments and commands.

A row of ``PLACES`` has shell lines to run before a command, in its working folder, and the statuses
that the command may end with. A row of ``COMMANDS`` or ``TRAINING`` is a command with its cheapest
settings. Each pair is a test: the command prints no traceback, and an error is one line. ``FAST``
has the pairs that `make test` runs.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from federated import TINY
from made_run import make_run
from requirements_files import ROOT
from test_deployment import Processes, written

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.overview import overview
from collapipe.deployment.server_folder import create
from collapipe.flower.commands import free_port
from collapipe.process.folders import TemporaryFolder

COLLAPIPE = (sys.executable, "-P", "-m", "collapipe")
RUN = (*TINY, "federation.rounds=1", "federation.num_units=1")
_WAIT_S = 1000  # on a machine that is very busy


PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
PROXIES["ALL_PROXY"] = "socks5://127.0.0.1:9"


@dataclass(frozen=True)
class Place:
    """An environment: shell lines before the command, the statuses that the command may have, and
    the ``TRAINING`` commands to try there."""

    prelude: str
    statuses: tuple[int, ...] = (0,)
    training: tuple[str, ...] = ("run",)


PLACES = {
    "ascii": Place(
        "export PYTHONIOENCODING=ascii LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
        training=("run", "up"),
    ),
    "latin-1": Place("export PYTHONIOENCODING=latin-1"),
    "no standard streams": Place("exec <&- >&- 2>&-", (0, 2), ("run", "up", "simulation")),
    "full device": Place("exec >/dev/full", (1,), ("run", "up", "resume")),
    "errors to a full device": Place("exec 2>/dev/full"),
    "reader that has left": Place("exec > >(exec true); sleep 0.2", (0, 1)),
    "folder that is gone": Place('mkdir gone && cd gone && rmdir "$PWD"', (0, 1, 2)),
    "modules of other people": Place(
        "for name in types psutil click torch; do echo 'raise SystemExit(9)' > $name.py; done; "
        "mkdir datasets numpy",
        training=("run", "up", "simulation"),
    ),
    "notebook": Place("export MPLBACKEND=module://matplotlib_inline.backend_inline"),
    "LaTeX that is missing": Place("echo 'text.usetex: True' > matplotlibrc"),
    "proxies": Place(
        "export " + " ".join(f"{name}={value}" for name, value in PROXIES.items()),
        training=("run", "up", "simulation"),
    ),
    "somebody's Ray": Place("export RAY_ADDRESS=127.0.0.1:9", training=("simulation",)),
    "no rights for new files": Place("umask 777", (0, 1, 2), ("run", "up")),
    "no home": Place("unset HOME; export XDG_CACHE_HOME=/proc/nowhere", training=("run", "up")),
    "few descriptors": Place("ulimit -n 256", training=("run", "up")),
    "warnings as errors": Place("export PYTHONWARNINGS=error::UserWarning"),
    "little memory": Place("ulimit -v 800000", (0, 1, 2)),
}
COMMANDS = {
    "plan": ("plan", ROOT / "docs/examples/workshop.yaml"),
    "picture": ("plan", ROOT / "docs/examples/workshop.yaml", "--plot", "plan.svg"),
    "report": ("report", "{made}"),
    "status": ("status", "{made}"),
    "latest": ("status",),
    "predict": ("predict", "{trained}", "Dienstag"),
    "device": ("device", "check", "{boxes}"),
    "deploy": ("deploy", "init", "federation", "--units", "a,b", "--server", "edge.example"),
}
TRAINING = {
    "run": ("run", *RUN, "hydra.run.dir=run"),
    "simulation": ("run", *RUN, "hydra.run.dir=run", "runtime=simulation"),
    "up": ("up", "--devices", "1", "--", "run", *RUN, "hydra.run.dir=run"),
    "resume": ("resume", "{trained}", "federation.rounds=2"),
}
# A command's status in a normal environment, if not 0.
STATUSES = {"latest": 2, "device": 1}
FAST = {
    ("ascii", "status"),
    ("full device", "plan"),
    ("folder that is gone", "latest"),
    ("notebook", "picture"),
}
PAIRS = [
    pytest.param(name, command, marks=() if (name, command) in FAST else pytest.mark.thorough)
    for name, place in PLACES.items()
    for command in (*COMMANDS, *place.training)
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the files that commands need, by their names in ``COMMANDS``."""
    folder = tmp_path_factory.mktemp("there")
    boxes = folder / "boxes.yaml"
    boxes.write_text((ROOT / "docs/examples/workshop.yaml").read_text())
    return {"made": make_run(folder / "von Jürgen"), "boxes": boxes, "trained": folder / "trained"}


def prepared(there: dict[str, Path], name: str) -> list[str]:
    """Return a command with its files; the trained run is made at its first use."""
    words = [str(each) for each in {**COMMANDS, **TRAINING}[name]]
    if "{trained}" in words and not there["trained"].exists():
        whole = *RUN, "federation.checkpoint_every=1", f"hydra.run.dir={there['trained']}"
        subprocess.run([*COLLAPIPE, "run", *whole], check=True, capture_output=True)
    return [each.format(**there) if each.startswith("{") else each for each in words]


@pytest.mark.parametrize(("place", "name"), PAIRS)
def test_a_command_in_any_environment_prints_errors_without_tracebacks(
    place: str, name: str, there: dict[str, Path], tmp_path: Path
) -> None:
    command = prepared(there, name)
    script = f"{PLACES[place].prelude}\nexec {shlex.join([*COLLAPIPE, *command])}"
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_WAIT_S,
    )
    output = ended.stdout + ended.stderr
    assert "Traceback" not in output, output
    assert ended.returncode in {STATUSES.get(name, 0), *PLACES[place].statuses}, output
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()  # one for each device that cannot be reached
        assert len(lines) <= 1 or all(line.startswith("error: ") for line in lines), output


def still_running(processes: Sequence[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Return the processes that run after ``within_s``. A zombie does not run: it has ended, but
    its parent has not read its status."""
    end = time.monotonic() + within_s
    while (left := [each for each in processes if runs(each)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        assert still_running([process], 0) == [process]
        child.kill()
        assert still_running([process], 60) == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("command", ["up", "simulation"])
def test_child_processes_end_with_their_command(
    command: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed terminal sends SIGHUP. A killed process cannot delete its files; the next start
    deletes them."""
    (temporary := tmp_path / "temporary").mkdir()
    words = [*map(str, TRAINING[command]), "federation.rounds=100000"]
    own = {**os.environ, "TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp"}
    with subprocess.Popen([*COLLAPIPE, *words], cwd=tmp_path, env=own) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists():
            assert process.poll() is None
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
    assert len(family) > 1
    assert still_running(family, 60) == []
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        TemporaryFolder("next").close()
    assert [*temporary.glob("collapipe-*")] == []


@pytest.mark.thorough
def test_a_unit_reaches_its_server_without_the_configured_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxies do not exist: a connection through one would fail. The SuperLink ends when its
    server is killed."""
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "temporary").mkdir()
    folder = create(tmp_path / "federation", ["berlin"], "127.0.0.1", free_port(), free_port())
    own = folder.root / "units" / "berlin"
    AuthorityFolder(folder.authority).add("berlin", Role.UNIT, 30, own / "credentials")
    written(own / "train.csv", 24)
    with Processes(tmp_path) as there:
        there.start("server", "deploy", "serve", folder.root)
        there.wait_for("server", " admitted")
        there.start("berlin", "unit", own / "unit.yaml")
        there.wait_for("berlin", ": dials ")
        while [each.state for each in overview(folder)[0]] != ["online"]:
            assert there.running["berlin"].poll() is None
            time.sleep(0.5)
        assert there.running["berlin"].poll() is None
        family = psutil.Process(there.running["server"].pid).children(recursive=True)
        assert family
        there.running["server"].kill()
        assert still_running(family, 60) == []
