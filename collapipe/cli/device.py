"""``collapipe device``: serve this machine's share of a model to a control unit."""

import json
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from collapipe.credentials.credentials import Credentials, load
from collapipe.errors import ConfigError
from collapipe.torch_device import torch_device
from device_app.daemon import Daemon, DeviceSettings

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


def serve(options: DeviceOptions) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ``ConfigError`` where that cannot begin."""
    _log_to(sys.stderr, options.log_format)
    torch.set_num_threads(options.threads)
    credentials = _credentials(options)
    name = credentials.name if credentials else options.name or socket.gethostname()
    own = torch_device("--torch-device", options.torch_device)
    settings = DeviceSettings(name, options.listen, memory_bytes(options.memory), own)
    with Daemon(settings, credentials) as daemon:
        leave = _ending(daemon)
        print(f"{name}: ready on {daemon.address}", flush=True)
        leave.wait()


def memory_bytes(text: str | None) -> float:
    """``1.5GB`` as bytes; None: half of what the machine has."""
    if text is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    for unit, scale in reversed(_UNITS.items()):
        number = text.removesuffix(unit)
        if unit in text[-2:] and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * scale
    raise ConfigError(f"--memory {text}: expected a number with MB or GB, such as 1.5GB")


def _credentials(options: DeviceOptions) -> Credentials | None:
    """What to serve and to dial with; None: nothing, on loopback."""
    if options.insecure:
        return None
    if options.credentials is None:
        raise ConfigError(
            "--credentials DIR is missing: `collapipe credentials` makes some; on this machine "
            "alone --insecure does without"
        )
    found = load(options.credentials)
    if options.name not in (None, found.name):
        raise ConfigError(
            f"--name {options.name}: the certificate in {options.credentials} is of {found.name}; "
            "leave --name out"
        )
    return found


def _ending(daemon: Daemon) -> threading.Event:
    """Set when the process is asked to end; asked twice, it ends at once."""
    ending = threading.Event()

    def ask(number: int, frame: object) -> None:
        if ending.is_set():
            os._exit(_AT_ONCE)
        ending.set()
        daemon.leave()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, ask)
    return ending


def _log_to(stream: TextIO, form: str) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines() if form == "json" else logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname, "message": record.getMessage()}
        return json.dumps(line)
