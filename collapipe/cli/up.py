"""``collapipe up``: start daemons on this machine, with an inventory of them, for trials."""

import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from collapipe.cli.device.command import memory_bytes
from collapipe.cli.exit_status import Reported
from collapipe.config.overrides import typed
from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority
from collapipe.errors import ConfigError, RoundFailedError
from collapipe.flower.commands import last_line
from collapipe.inventory.measured_step import step_file
from collapipe.process.children import ending
from collapipe.process.folders import TemporaryFolder
from collapipe.runs.confirmation import started_by

_READY = ": ready on "
_HEADER = (
    "# Daemons of `collapipe up` on this machine. The model is a run's without options. Assumed\n"
    "# flops_per_s and d2d_rate_bps: `collapipe device measure FILE --write` replaces them.\n"
)
_POLL_S, _LOOK_S, _END_S = 0.1, 1.0, 20.0


class Started(NamedTuple):
    """A ``collapipe`` command, which is ready once its log has the ``words`` so many ``times``."""

    command: tuple[str, ...]
    words: str
    times: int


def up(
    devices: int,
    clusters: int,
    inventory: Path | None,
    memory: str,
    run: Sequence[str],
    program: Sequence[str],
) -> int:
    """Start ``devices`` daemons for each of ``clusters``, and run the command ``run`` on them.

    ``memory`` has one figure for all daemons, or one per daemon of a cluster. ``program`` starts
    ``collapipe`` with the arguments after it. Returns the command's exit status; without a command,
    0 after Ctrl-C or SIGTERM.
    """
    shares = _shares(memory, devices)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryFolder("up"))
        file = stack.enter_context(_new_file(inventory or folder / "inventory.yaml"))
        names = [f"device-{number}" for number in range(devices * clusters)]
        credentials = temporary_authority(folder / "credentials", names)
        own = credentials.pop(CONTROL_UNIT)
        daemons = _daemon_commands(credentials, shares * clusters, folder)
        processes = stack.enter_context(started(program, daemons))
        local = _devices(processes, shares * clusters)
        groups = [local[n * devices : (n + 1) * devices] for n in range(clusters)]
        file.write_text(_inventory(groups, own), encoding="utf-8")
        own_file = typed("cluster.file", file.resolve())
        one_thread = "pipeline.threads=1"  # as each daemon: all share this machine's cores
        on_them = [f"federation.num_units={clusters}", "cluster=devices", own_file, one_thread]
        command = [run[0], *on_them, *run[1:]] if run else []
        if run[:1] == ["resume"]:  # the other options are in the run's folder
            command = [*run, own_file]
        again = f"--devices={devices}", f"--clusters={clusters}", f"--memory={memory}"
        stack.enter_context(started_by("up", *again))
        where = f"inventory {file}"
        return run_or_wait(program, command, on_them, where, "the devices", processes)


def _shares(memory: str, devices: int) -> list[str]:
    """Return the memory of each device. Raises ``ConfigError`` for another number of figures."""
    shares = memory.split(",")
    for each in shares:
        memory_bytes(each)
    if len(shares) not in (1, devices):
        raise ConfigError(
            f"--memory {memory}: has {len(shares)} figures for {devices} devices; give one for all "
            "of them or one for each"
        )
    return shares if len(shares) == devices else shares * devices


@contextmanager
def _new_file(file: Path) -> Iterator[Path]:
    """Make an empty file, and remove it at the end. Raises ``ConfigError`` if it cannot be made."""
    try:
        if not file.exists():
            step_file(file).unlink(missing_ok=True)  # of devices that are gone
        file.touch(exist_ok=False)
    except OSError as error:
        raise ConfigError(
            f"--inventory {file}: cannot be made ({error.strerror}); name another file"
        ) from error
    try:
        yield file
    finally:
        for each in (file, step_file(file)):
            each.unlink(missing_ok=True)


def run_or_wait(
    program: Sequence[str],
    arguments: Sequence[str],
    on_them: Sequence[str],
    where: str,
    started: str,
    processes: "Mapping[Path, subprocess.Popen[bytes]]",
) -> int:
    """Run a command on what was ``started``, and return its exit status.

    Without ``arguments``, print ``where`` it is, the options ``on_them`` that use it, and each of
    its ``processes`` (by log file) that ends; return 0 after Ctrl-C.
    """
    if arguments:
        verbose = logging.getLogger("collapipe").isEnabledFor(logging.DEBUG)
        return run_command([*program, *["--verbose"] * verbose, *arguments])
    with suppress(KeyboardInterrupt):
        print(f"{where}\n{shlex.join(['collapipe', 'run', *on_them])}")
        print(f"Ctrl-C ends {started}", flush=True)
        running = dict(processes)
        while True:
            for log in [log for log, process in running.items() if process.poll() is not None]:
                status = running.pop(log).returncode
                last = last_line(log.read_text(errors="replace"))
                print(f"{log.stem} has ended, status {status}: {last}", flush=True)
            time.sleep(_LOOK_S)
    return 0


def run_command(command: Sequence[str]) -> int:
    """Run a command in a new process, pass interrupts on, and return its exit status. If a signal
    ended the process, the status is 128 + the signal's number, as in a shell."""
    with subprocess.Popen(command, start_new_session=True) as process:  # noqa: S603 - our own
        while True:
            try:
                status = process.wait()
                return Reported(status if status >= 0 else 128 - status)
            except KeyboardInterrupt:
                process.terminate()  # SIGINT is ignored in background jobs of scripts


def _daemon_commands(
    credentials: Mapping[str, Path], memory: Sequence[str], folder: Path
) -> dict[Path, Started]:
    """Return the command of each daemon by its log file in ``folder``."""
    commands = dict[Path, Started]()
    for (name, own), share in zip(credentials.items(), memory, strict=True):
        command = "device", "--listen", "127.0.0.1:0", "--memory", share
        commands[folder / f"{name}.log"] = Started((*command, "--credentials", str(own)), _READY, 1)
    return commands


def _devices(
    processes: "Mapping[Path, subprocess.Popen[bytes]]", memory: Sequence[str]
) -> list[dict[str, object]]:
    """Return the started daemons for the inventory; each wrote its address to its log. Speeds are
    placeholders, equal for all."""
    return [
        {
            "name": log.stem,
            "address": address,
            "process_id": str(process.pid),
            "flops_per_s": "1e10",  # a text, which YAML writes as it is
            "d2d_rate_bps": "8e9",
            "memory_bytes": int(memory_bytes(share)),
        }
        for (log, process), share in zip(processes.items(), memory, strict=True)
        for address in re.findall(f"{_READY}(.+)", log.read_text())
    ]


@contextmanager
def started(
    program: Sequence[str], commands: Mapping[Path, Started]
) -> Iterator[Mapping[Path, "subprocess.Popen[bytes]"]]:
    """Start ``collapipe`` commands and wait until they are ready; end them with the context.

    ``commands`` maps log files to them. Raises ``RoundFailedError`` if one ends before that.
    """
    processes = dict[Path, "subprocess.Popen[bytes]"]()
    with ending(processes.values(), _END_S):
        for log, (command, _, _) in commands.items():
            cache = {"XDG_CACHE_HOME": str(log.parent / "cache")}
            with log.open("w") as output:
                processes[log] = subprocess.Popen(  # noqa: S603 - our own command
                    [*program, *command],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, **cache},
                )
        for log, (_, words, times) in commands.items():
            while log.read_text().count(words) < times:
                _check_running(processes, commands)
                time.sleep(_POLL_S)
        yield processes


def _check_running(
    processes: Mapping[Path, "subprocess.Popen[bytes]"], commands: Mapping[Path, Started]
) -> None:
    for log, process in processes.items():
        if process.poll() is not None:
            shown = shlex.join(["collapipe", *commands[log].command])
            raise RoundFailedError(f"{shown}: has ended: {last_line(log.read_text())}")


def _inventory(groups: Sequence[Sequence[Mapping[str, object]]], credentials: Path) -> str:
    """Return the inventory of the clusters' devices as YAML."""
    tree = {
        "batch_size": 64,
        "model": {"name": "dates_transformer", "tokens": 32},
        "credentials": str(credentials),
        "clusters": [
            {"name": f"cluster-{n}", "devices": devices} for n, devices in enumerate(groups)
        ],
    }
    text: str = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    return _HEADER + text
