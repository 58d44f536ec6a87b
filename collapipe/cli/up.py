"""``collapipe up``: daemons on this machine, with an inventory of them, for trials."""

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from collapipe.credentials.authority import CONTROL_UNIT, temporary_authority
from collapipe.errors import ConfigError, RoundFailedError

_READY = ": ready on "
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A daemon of ours."""

    name: str
    address: str
    process: subprocess.Popen[str]


def up(devices: int, clusters: int, inventory: Path | None, memory: str, run: Sequence[str]) -> int:
    """Start ``devices`` daemons for each of ``clusters``; the exit status of ``run``, or 0 after
    Ctrl-C or SIGTERM."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collapipe-up-")))
        file = inventory or folder / "inventory.yaml"
        if inventory is not None and inventory.exists():
            raise ConfigError(f"--inventory {inventory}: exists; remove it, or name another file")
        names = [f"device-{number}" for number in range(devices * clusters)]
        credentials = temporary_authority(folder / "credentials", names)
        started = [
            stack.enter_context(_daemon(name, memory, credentials[name], folder)) for name in names
        ]
        groups = [started[n * devices : (n + 1) * devices] for n in range(clusters)]
        own = credentials[CONTROL_UNIT]
        file.write_text(_inventory(groups, memory, own), encoding="utf-8")
        if inventory is not None:
            stack.callback(file.unlink, missing_ok=True)
        if run:
            return _run([*run, "cluster=devices", f"cluster.file={file.resolve()}"])
        print(
            f"inventory {file}\ncollapipe run cluster=devices cluster.file={shlex.quote(str(file))}"
        )
        print("Ctrl-C ends the devices", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


def _run(arguments: Sequence[str]) -> int:
    """``collapipe`` in a process of its own, ended with us."""
    command = [sys.executable, "-m", "collapipe", *arguments]
    with subprocess.Popen(command) as process:  # noqa: S603 - our own command
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            return process.wait()


@contextmanager
def _daemon(name: str, memory: str, credentials: Path, folder: Path) -> Iterator[LocalDevice]:
    """A daemon that is ready, and ends when the context does."""
    command = [sys.executable, "-m", "collapipe", "device", "--listen", "127.0.0.1:0"]
    command += ["--memory", memory, "--credentials", str(credentials)]
    log = (folder / f"{name}.log").open("w")
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if _READY not in line:
            words = (folder / f"{name}.log").read_text().strip().splitlines()
            raise RoundFailedError(f"{name}: did not start: {words[-1] if words else 'no output'}")
        yield LocalDevice(name, line.rpartition(_READY)[2].strip(), process)
    finally:
        log.close()
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _inventory(groups: Sequence[Sequence[LocalDevice]], memory: str, credentials: Path) -> str:
    """YAML; speeds are placeholders, the same for all."""
    from collapipe.cli.device import memory_bytes

    lines = [
        "# Daemons of `collapipe up` on this machine. Speeds and rates are assumed alike, not",
        "# measured: `collapipe device measure` measures them.",
        "batch_size: 64",
        "model: {name: transformer}",
        f"credentials: {json.dumps(str(credentials))}",
        "clusters:",
    ]
    for n, group in enumerate(groups):
        lines += [f"  - name: cluster-{n}", "    devices:"]
        for each in group:
            lines += [
                f"      - name: {each.name}",
                f"        address: {each.address}",
                f'        process_id: "{each.process.pid}"',
                "        flops_per_s: 1.0e10",
                "        d2d_rate_bps: 8.0e9",
                f"        memory_bytes: {memory_bytes(memory):.0f}",
            ]
    return "\n".join(lines) + "\n"
