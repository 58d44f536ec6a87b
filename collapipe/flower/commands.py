"""Run Flower's commands as subprocesses: the app that they run, their environment, their replies,
and a run's output."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from collapipe.errors import CollaPipeError, LinkError
from collapipe.own_packages import NAMES
from collapipe.process.children import own_environment
from collapipe.process.folders import TemporaryFolder
from collapipe.process.streams import lasting_output

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Seconds until a run is noticed, 1 by default; at 0.1 an idle SuperLink took 0.12 of a core.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "PYTHONUNBUFFERED": "1",  # flwr log prints each line when it comes
    "TERM": "dumb",  # FORCE_COLOR would colour Flower's JSON
}
_START_SECONDS = 240.0  # a SuperLink needs 2 to 4 s, and minutes on a busy machine
_POLL_SECONDS = 0.1
_NOT_SHOWN = b"Using SuperLink:", b"Successfully installed", b"error: "
_FINISHED = "finished:completed"
_ACTIVATION_FAILED = 2004  # Flower's code if a node with the key is online
StatesOf = Callable[[str], Mapping[str, str]]
"""Run id → status by id, without a run that the SuperLink does not know."""
_ROOT = Path(__file__).parents[2]
_FILES = "pyproject.toml", "LICENSE"


@dataclass(frozen=True)
class Flower:
    """A FLWR_HOME, the environment of its processes, and the folder in which they run."""

    home: Path
    environment: Mapping[str, str]
    folder: Path

    @classmethod
    def at(
        cls, home: Path, more: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> "Flower":
        """Return a quiet, offline environment with this Python's commands on the path.

        ``more`` overrides environment variables. ``folder`` must be empty, because Flower's
        processes import modules from it; None makes one in ``home``.
        """
        if folder is None:
            folder = home / "empty"
            folder.mkdir(exist_ok=True)
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        own = {"FLWR_HOME": str(home), "PATH": os.pathsep.join(path)}
        logs = {"FLWR_LOG_LEVEL": "ERROR"}  # for Flower only; the app's lines are all shown
        common = {**logs, **own_environment(os.environ), **_QUIET}
        return cls(home, {**common, **(more or {}), **own}, folder)

    @contextmanager
    def process(
        self, command: Sequence[str], stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a Flower command; wait for it, or kill it after an exception in the block.

        The terminal's Ctrl-C does not reach it, because the caller handles interrupts.
        """
        program = shutil.which(command[0], path=self.environment["PATH"])
        if program is None:
            raise CollaPipeError(
                f"the command {command[0]} was not found; pip install 'collapipe[train]'"
            )
        with (
            subprocess.Popen(  # noqa: S603 - Flower's own commands, no shell
                [program, *command[1:]],
                cwd=self.folder,
                env=self.environment,
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

    def ask(self, *arguments: str, wanted: str = "success") -> Any:
        """Return the field ``wanted`` of what ``flwr ARGUMENTS --format json`` answers.

        Raises ``LinkError`` if there is none; Flower exits with 0 on errors, too.
        """
        command = ["flwr", *arguments, "--format", "json"]
        with self.process(command, subprocess.PIPE, subprocess.STDOUT) as process:
            output = process.communicate()[0].decode(errors="replace")
        with suppress(ValueError):
            answer = json.loads(output)
            if answer.get("success") and wanted in answer:
                return answer[wanted]
            output = str(answer.get("error-message", output))
        raise LinkError(f"flwr {arguments[0]} failed: {last_line(output)}")

    def _stream_log(self, run_id: str, *connection: str) -> None:
        """Copy the run's output to standard output, line by line, until the run ends. Flower's own
        lines are left out, and so is the error: the waiting command prints it."""
        command = ["flwr", "log", run_id, *connection, "--stream"]
        with self.process(command, subprocess.PIPE, subprocess.DEVNULL) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(_NOT_SHOWN):
                    print(line.decode(errors="replace"), end="", file=lasting_output(), flush=True)

    def submit(self, app_dir: Path, settings: str, resume: str | None, *options: str) -> str:
        """Start a run with ``flwr run``, and return its id.

        The app gets ``settings``, the text of the options, and the checkpoint ``resume``. Raises
        ``LinkError`` if Flower does not reply or refuses the app.
        """
        with TemporaryFolder("run") as folder:
            file = folder / "run.toml"
            file.write_text(run_config(settings, resume), encoding="utf-8")
            own = [str(app_dir.resolve()), *options, "--run-config", str(file)]
            return str(self.ask("run", *own, wanted="run-id"))

    def wait(self, run_id: str, *connection: str, states_of: StatesOf | None = None) -> bool:
        """Wait until the run ends, and return whether it succeeded.

        The run's output is copied to standard output. Without ``states_of`` Flower's command is
        asked for the status. Raises ``LinkError`` if the SuperLink does not answer, or does not
        know the run.
        """
        self._stream_log(run_id, *connection)
        status = ""
        while not status.startswith("finished"):  # the log may break off before that
            time.sleep(1.0 if status else 0.0)
            if states_of is not None:
                found = states_of(run_id).get(run_id)
            else:
                runs = self.ask("list", *connection, "--run-id", run_id, wanted="runs")
                found = str(runs[0].get("status", "")) if runs else None
            if found is None:  # Flower keeps runs in memory
                raise LinkError(
                    f"the SuperLink knows no run {run_id}: another one was started meanwhile"
                )
            status = found
        return status == _FINISHED


def run_config(settings: str, resume: str | None) -> str:
    """Return a TOML file for ``flwr run --run-config``.

    TOML has the quotes and escapes of JSON. It also forbids DEL.
    """
    texts = {"settings": settings, "resume": resume or ""}
    lines = [f"{name} = {json.dumps(text)}\n" for name, text in texts.items()]
    return "".join(lines).replace("\x7f", "\\u007f")


@contextmanager
def app_folder(root: Path = _ROOT) -> Iterator[Path]:
    """Yield CollaPipe as an app for ``flwr run``: a temporary copy of the packages, with ``_FILES``
    at its root.

    It is small: of a checkout Flower would pack pages and tests too, and search its ``.venv`` for
    several seconds. pip installs ``_FILES`` inside the package (``force-include`` in
    ``pyproject.toml``).
    """
    with TemporaryFolder("app") as folder:
        for package in ("collapipe", "conf", *NAMES):
            compiled = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / package, folder / package, ignore=compiled)
        for file in _FILES:
            (folder / "collapipe" / file).unlink(missing_ok=True)
            own = root / file
            shutil.copy(own if own.exists() else root / "collapipe" / file, folder / file)
        yield folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def wait_until_open(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            cause = last_line(log.read_text(errors="replace"))
            raise CollaPipeError(
                f"port {port}: Flower ended with status {process.returncode} before it listened "
                f"there; free the port or run again: {cause}"
            )
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(_POLL_SECONDS)
    raise CollaPipeError(f"port {port}: Flower took over {_START_SECONDS:.0f} s; free some cores")


def why_it_ended(log: str) -> str:
    """Return the reason in a SuperNode's log: its last line, unless the server refused a node that
    is online already."""
    if f"[code: {_ACTIVATION_FAILED}]" in log:
        return (
            "another machine takes part with this unit's key, or the server has not noticed yet "
            "that this one left, which takes up to a minute"
        )
    return last_line("\n".join(each for each in log.splitlines() if not each.startswith("INFO:")))


def last_line(text: str) -> str:
    """Return the last line with content; httpx appends a link for more information to errors."""
    lines = [each for each in text.splitlines() if each.strip() and not each.startswith("For more")]
    return lines[-1].strip() if lines else "it said nothing"
