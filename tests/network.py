"""A private network on this machine: namespaces around a switch, links of limited rate, and limits
of processor and memory. It is removed when the context ends. It needs CAP_NET_ADMIN and
CAP_SYS_ADMIN."""

import os
import random
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_BURST, _LATENCY = "64kb", "100ms"  # a link's burst, and the longest delay in its queue
_CGROUP = Path("/sys/fs/cgroup")
_PERIOD_US = 12_500  # a quota's period; the smallest quota is 1,000 µs: 0.08 cores


class UnavailableError(Exception):
    """This machine lacks the rights or tools."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place to start a process: ``command`` precedes the process's command; ``host`` is the
    address."""

    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """``places`` reach each other and this process; each has its own link."""

    places: Sequence[Place]
    switch: str

    def cut(self, number: int) -> None:
        """Disconnect a place without notice to either end."""
        self._set(number, "down")

    def mend(self, number: int) -> None:
        """Reconnect a place."""
        self._set(number, "up")

    def _set(self, number: int, state: str) -> None:
        _run("ip", "-n", self.switch, "link", "set", f"port{number}", state)


@contextmanager
def network(count: int, rate_bps: float | None = None) -> Iterator[Network]:
    """Make ``count`` places whose links carry ``rate_bps`` in each direction; None: unlimited.

    Raises ``UnavailableError`` if rights are missing.
    """
    name = f"collapipe-{secrets.token_hex(4)}"
    subnet = f"198.{random.choice((18, 19))}.{random.randrange(256)}"  # RFC 2544: for benchmarks
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace(f"{name}-switch"))
        _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        own = f"cp{name[-8:]}"
        _run("ip", "link", "add", own, "type", "veth", "peer", "own", "netns", switch)
        _plug(switch, "own")
        _run("ip", "address", "add", f"{subnet}.1/24", "dev", own)
        _run("ip", "link", "set", own, "up")
        places = []
        for number in range(count):
            place = stack.enter_context(_namespace(f"{name}-{number}"))
            host, port = f"{subnet}.{number + 2}", f"port{number}"
            within, at_switch = ("-n", place), ("-n", switch)
            ends = ("eth0", "type", "veth", "peer", port, "netns", switch)
            _run("ip", *within, "link", "add", *ends)
            _plug(switch, port)
            _run("ip", *within, "address", "add", f"{host}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", *within, "link", "set", device, "up")
            if rate_bps is not None:
                _shape(within, "eth0", rate_bps)
                _shape(at_switch, port, rate_bps)
            places.append(Place(host, ("ip", "netns", "exec", place)))
        yield Network(places, switch)


@contextmanager
def cpu_quota(cores: float, weight: float) -> Iterator[Path]:
    """Yield a file; processes whose ids are written there use at most ``cores`` together.

    On a busy processor they get as much time as ``weight`` other processes. Raises
    ``UnavailableError`` if no controller of the processor is writable.
    """
    with _group(*_controller(int(cores * _PERIOD_US), weight)) as processes:
        yield processes


@contextmanager
def memory_limit(most_bytes: int) -> Iterator[Path]:
    """Yield a file; processes whose ids are written there end if together they need more than
    ``most_bytes``.

    Raises ``UnavailableError`` if no controller of memory is writable.
    """
    first = (_CGROUP / "memory/memory.limit_in_bytes").exists()
    root, file = (_CGROUP / "memory", "limit_in_bytes") if first else (_CGROUP, "max")
    with _group(root, {f"memory.{file}": str(most_bytes)}) as processes:
        yield processes


@contextmanager
def _group(root: Path, settings: Mapping[str, str]) -> Iterator[Path]:
    folder = root / f"collapipe-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        for file, value in settings.items():
            (folder / file).write_text(value)
    except OSError as error:
        _remove(folder)
        raise UnavailableError(f"{folder}: {error}") from error
    try:
        yield folder / "cgroup.procs"
    finally:
        _remove(folder)


def _controller(quota_us: int, weight: float) -> tuple[Path, dict[str, str]]:
    """Return the folder for groups of processes and the files that limit a group, for cgroup v1 or
    v2."""
    if (_CGROUP / "cpu/cpu.cfs_quota_us").exists():
        quota = {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{quota_us}"}
        return _CGROUP / "cpu", {**quota, "cpu.shares": f"{1024 * weight:.0f}"}
    weights = {"cpu.weight": f"{100 * weight:.0f}"}
    return _CGROUP, {"cpu.max": f"{quota_us} {_PERIOD_US}", **weights}


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        raise UnavailableError("network namespaces need root, and iproute2 (ip, tc)")
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        _run("ip", "netns", "delete", name)  # this also deletes both ends of its links


def _plug(switch: str, port: str) -> None:
    _run("ip", "-n", switch, "link", "set", port, "up", "master", "bridge")


def _shape(namespace: Sequence[str], device: str, rate_bps: float) -> None:
    rate = "rate", f"{rate_bps:.0f}bit", "burst", _BURST, "latency", _LATENCY
    _run("tc", *namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise UnavailableError(f"{' '.join(command)}: {ended.stderr.strip()}")


def _remove(folder: Path) -> None:
    """Remove the group once its processes have ended, which takes the kernel a moment."""
    for _ in range(100 * folder.exists()):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)
