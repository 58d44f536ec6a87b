"""Resident memory of processes, sampled while they work, separately for anonymous and
file-backed."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

_EVERY_S = 0.1
_KB = re.compile(r"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)
_PROGRAMS = {  # words of a command line → the program's name
    "server_app.guard": "SuperLink",
    "collapipe.flower.supernode": "SuperNode",
    "collapipe.flower.superexec": "SuperExec",
    "flwr-serverapp": "ServerApp",
}


@dataclass
class Peak:
    """Peak bytes of a process; the kinds of memory may peak at different times."""

    whole: int = 0
    anonymous: int = 0
    file_backed: int = 0

    def see(self, pid: int) -> None:
        """Sample once; ignore a process that has ended."""
        with suppress(FileNotFoundError, ProcessLookupError):
            found = {name: int(kb) * 1024 for name, kb in _KB.findall(_status(pid))}
            if found:  # the status of a process that is ending lacks memory
                self.whole = max(self.whole, found["VmHWM"])
                self.anonymous = max(self.anonymous, found["RssAnon"])
                self.file_backed = max(self.file_backed, found["RssFile"] + found["RssShmem"])


@dataclass
class Peaks:
    """Peaks of processes and their descendants, by name."""

    roots: Mapping[str, int]
    found: dict[str, Peak] = field(default_factory=dict)

    def sample(self) -> None:
        """Sample every process once. Processes of one program share an entry, the largest peak."""
        for name, pid in self.roots.items():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for each in (root, *root.children(recursive=True)):
                    program = _program(each)
                    called = f"{name}: {program}" if program else name
                    self.found.setdefault(called, Peak()).see(each.pid)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The peaks as a JSON tree."""
        return {name: asdict(each) for name, each in self.found.items()}


@contextmanager
def sampled(roots: Mapping[str, int]) -> Iterator[Peaks]:
    """Sample until the context ends; ``roots`` maps names to process ids."""
    peaks = Peaks(roots)
    with every(_EVERY_S, peaks.sample):
        yield peaks


@contextmanager
def every(seconds: float, sample: Callable[[], None]) -> Iterator[None]:
    """Call ``sample`` in a thread until the context ends."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds):
            sample()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _program(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for word, name in _PROGRAMS.items() if word in words), "")


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()
