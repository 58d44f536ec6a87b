"""``collapipe device``: serve this machine's share of a model to a control unit."""

import itertools
import json
import logging
import os
import queue
import signal
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from collapipe.cli.log_limits import LogLimits
from collapipe.errors import ConfigError

if TYPE_CHECKING:
    from collapipe.credentials.credentials import Credentials

_AT_ONCE = 3  # exit status after a second signal
_UNITS = {"": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """The command's options."""

    listen: str
    name: str | None
    memory: str | None
    threads: int
    torch_device: str
    credentials: Path | None
    insecure: bool
    log_format: str


def serve(options: DeviceOptions) -> NoReturn:
    """Serve until SIGTERM or Ctrl-C ends the process. Raises ``ConfigError`` where that cannot
    begin."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(options.log_format))
    handler.addFilter(LogLimits())
    for library, silence in (("GRPC", "NONE"), ("TRANSFORMERS", "critical")):
        os.environ.setdefault(f"{library}_VERBOSITY", silence)  # what matters is a line of ours
    memory, credentials = memory_bytes(options.memory), _credentials(options)
    name = credentials.name if credentials else options.name or socket.gethostname()
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    asked = _asked_to_end()
    import torch  # takes seconds, in which a signal may come

    from collapipe.torch_device import torch_device
    from device_app.daemon import Daemon, DeviceSettings

    torch.set_num_threads(options.threads)
    own = torch_device("--torch-device", options.torch_device)
    with Daemon(DeviceSettings(name, options.listen, memory, own), credentials) as daemon:
        print(f"{name}: ready on {daemon.address}", flush=True)
        asked.get()
        daemon.leave()
    os._exit(0)  # the interpreter's own end tears threads out of gRPC and torch, which aborts


def memory_bytes(text: str | None) -> float:
    """``1.5GB`` as bytes; None: half of what the machine has."""
    if text is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    for unit, scale in reversed(_UNITS.items()):
        number = text.removesuffix(unit)
        if unit in text[-2:] and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * scale
    raise ConfigError(f"--memory {text}: expected a number with MB or GB, such as 1.5GB")


def _credentials(options: DeviceOptions) -> "Credentials | None":
    """What to serve and to dial with; None: nothing, on loopback."""
    if options.insecure:
        return None
    if options.credentials is None:
        raise ConfigError(
            "--credentials DIR is missing: `collapipe credentials` makes some; on this machine "
            "alone --insecure does without"
        )
    from collapipe.credentials.credentials import load

    found = load(options.credentials)
    if options.name not in (None, found.name):
        raise ConfigError(
            f"--name {options.name}: the certificate in {options.credentials} is of {found.name}; "
            "leave --name out"
        )
    return found


def _asked_to_end() -> queue.SimpleQueue[int]:
    """Gets the first SIGTERM or Ctrl-C from now on; a second one ends the process at once."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal handler may use it
    earlier = itertools.count()

    def ask(number: int, frame: object) -> None:
        if next(earlier):
            os._exit(_AT_ONCE)
        asked.put(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, ask)
    return asked


def _formatter(form: str) -> logging.Formatter:
    if form == "plain":
        return logging.Formatter("%(message)s")
    if form == "json":
        return _JsonLines()
    raise ConfigError(f"--log-format {form}: must be plain or json")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        return json.dumps(line)
