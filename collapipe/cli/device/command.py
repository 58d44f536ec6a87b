"""``collapipe device``: serve this machine's share of a model to a control unit."""

import itertools
import logging
import os
import queue
import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe.cli.device.log_limits import JsonLines, LogLimits
from collapipe.cli.options import Json
from collapipe.credentials.addresses import host_and_port
from collapipe.credentials.member import Role, check_name
from collapipe.errors import ConfigError, faults_of
from collapipe.process.host import usable_memory_bytes

if TYPE_CHECKING:
    from collapipe.credentials.credentials import Credentials

_AT_ONCE = 3  # exit status after a second signal
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_MEMORY = re.compile(r"(\d+\.?\d*|\.\d+)(kB|MB|GB)")
_HUB_ID = re.compile(r"[\w-]+(/[\w.-]+)?")  # NAME or ORG/NAME

app = typer.Typer(invoke_without_command=True, help="Serve a segment; ask devices.")
Inventory = Annotated[Path, Argument(help="YAML file with an address of each device.")]


@app.callback()
def device(
    context: typer.Context,
    listen: Annotated[str, Option(help="HOST:PORT; port 0: any free one.")] = "127.0.0.1:0",
    credentials: Annotated[Path | None, Option(help="This device's folder.")] = None,
    name: Annotated[
        str | None, Option(help="Default: the credentials' name, else the machine's.")
    ] = None,
    memory: Annotated[
        str | None, Option(help="Such as 1.5GB; default: half of all that it may use.")
    ] = None,
    threads: Annotated[int, Option(min=1, help="Of torch.")] = 1,
    torch_device: Annotated[
        str, Option(help="auto, cpu, cuda, cuda:1 or mps, as runtime.torch_device of a run.")
    ] = "cpu",
    model: Annotated[
        str | None, Option(help="Folder or hub id of which blocks need not be sent.")
    ] = None,
    insecure: Annotated[
        bool, Option("--insecure", help="Without encryption, on loopback only.")
    ] = False,
    log_format: Annotated[str, Option(help="plain or json.")] = "plain",
) -> None:
    """Serve segments of a model to control units, one unit at a time, until SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    _log_as(log_format)
    given_bytes, has_bytes = memory_bytes(memory), 2 * memory_bytes(None)
    if torch_device == "cpu" and given_bytes > has_bytes:
        raise ConfigError(f"--memory {memory}: this process may use {has_bytes / 1e9:.3g} GB")
    if insecure and credentials is not None:
        raise ConfigError("--insecure, --credentials: contradict each other; leave one out")
    if insecure and name is not None:
        check_name(name)  # which names a folder, too
    own = None if insecure else _credentials(credentials, name)
    if model is not None and not Path(model).is_dir() and not _HUB_ID.fullmatch(model):
        raise ConfigError(f"--model {model}: no such folder, and no hub id such as ORG/NAME")
    with faults_of("--listen"):
        host_and_port(listen)
    stop_signals = _stop_signals()
    import torch  # takes seconds, in which a signal may come

    from collapipe.process import torch_device as torch_devices
    from pipeline.devices.daemon.server import Daemon, DeviceSettings

    torch.set_num_threads(threads)
    shown = own.member.name if own else name or socket.gethostname()
    where = torch_devices.torch_device("--torch-device", torch_device)
    with Daemon(DeviceSettings(shown, listen, given_bytes, where, model), own) as daemon:
        print(f"{shown}: ready on {daemon.address}", flush=True)
        stop_signals.get()
        daemon.leave()
    os._exit(0)  # a normal exit would end threads inside gRPC and torch, which aborts


@app.command()
def check(inventory: Inventory, as_json: Json = False) -> None:
    """Query every device of an inventory, and time the hops; status 1 if any fails."""
    from collapipe.cli.device.survey import check as ask

    raise typer.Exit(ask(inventory, as_json))


@app.command()
def measure(
    inventory: Inventory,
    overrides: Annotated[
        list[str] | None,
        Argument(help="Options of collapipe run; default: the inventory's model."),
    ] = None,
    write: Annotated[bool, Option("--write", help="Put the laws into the inventory.")] = False,
    repeats: Annotated[
        int, Option(min=1, max=100, help="Micro-batches of each size, 3 to 10 times.")
    ] = 5,
    learnt: Annotated[Path | None, Option("--from", help="A run's folder: take its laws.")] = None,
) -> None:
    """Time micro-batches of a model on every device, and hops; plans and runs use the laws.

    Give the options of the run that is planned: collapipe device measure boxes.yaml model.dim=256
    """
    if learnt is not None:
        from collapipe.cli.device.learnt import take_steps

        raise typer.Exit(take_steps(inventory, learnt, overrides or [], write))
    from collapipe.cli.device.measure import measure_devices

    raise typer.Exit(measure_devices(inventory, overrides or [], repeats, write))


def memory_bytes(text: str | None) -> float:
    """Convert a text such as ``1.5GB`` to bytes; None is half of ``usable_memory_bytes``.

    Raises ``ConfigError`` for any other text.
    """
    if text is None:
        return usable_memory_bytes() / 2
    found = _MEMORY.fullmatch(text)
    if found and (number := float(found[1])) > 0:
        return number * _UNITS[found[2]]
    raise ConfigError(f"--memory {text}: expected a number with MB or GB, such as 1.5GB")


def _credentials(folder: Path | None, name: str | None) -> "Credentials":
    """Load the device's credentials. Raises ``ConfigError`` if they are missing or do not fit."""
    if folder is None:
        raise ConfigError(
            "--credentials DIR is missing: `collapipe credentials` makes some; on this machine "
            "alone --insecure does without"
        )
    from collapipe.credentials.credentials import load

    found = load(folder)
    if found.member.role != Role.DEVICE:
        raise ConfigError(f"--credentials {folder}: is of {found.member}; name a device's folder")
    if name not in (None, found.member.name):
        raise ConfigError(
            f"--name {name}: the certificate in {folder} is of {found.member.name}; leave --name "
            "out"
        )
    return found


def _stop_signals() -> queue.SimpleQueue[int]:
    """Return a queue that gets the first SIGTERM, SIGHUP or Ctrl-C.

    A second signal ends the process at once.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # a signal handler may use it
    earlier = itertools.count()

    def ask(number: int, frame: object) -> None:
        if next(earlier):
            os._exit(_AT_ONCE)
        signals.put(number)

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(each, ask)
    return signals


def _log_as(form: str) -> None:
    """Set the form of log lines, and silence libraries; call it before importing libraries.

    Raises ``ConfigError`` for an unknown form.
    """
    plain = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")  # local time
    forms = {"plain": plain, "json": JsonLines()}
    if form not in forms:
        raise ConfigError(f"--log-format {form}: must be plain or json")
    handler = logging.StreamHandler()
    handler.setFormatter(forms[form])
    handler.addFilter(LogLimits())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library, silence in (("GRPC", "NONE"), ("TRANSFORMERS", "critical")):
        os.environ.setdefault(f"{library}_VERBOSITY", silence)
