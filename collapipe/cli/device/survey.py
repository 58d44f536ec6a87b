"""The state of an inventory's devices and hops, as the control unit finds it: ask, time and show
them (``collapipe device check``)."""

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from collapipe import __version__
from collapipe.cli.device.hop_times import Trip, fit_hop, hop_trips
from collapipe.cli.device.trial_round import LostDeviceError
from collapipe.credentials.credentials import load
from collapipe.credentials.member import expires_soon
from collapipe.errors import (
    CancelledRoundError,
    CollaPipeError,
    ConfigError,
    StorageError,
    printable,
)
from collapipe.formatting import amount, block_range, print_lines, print_table, seconds
from collapipe.inventory import yaml_file
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Dialer
from pipeline.devices.control_unit.blame import UnreachedError
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.control_unit.dialling import BusyDeviceError
from pipeline.devices.messages import FRAME_SHARE, DeviceStatus

_ANSWER_S = 8.0  # time in which a working device answers, also on a busy machine
CONTROL_UNIT = "control unit"
_AT_ONCE = 64
_COLUMNS = ("device", "doing", "version", "torch", "memory", "free", "speed", "certificate")
_HOP_COLUMNS = ("hop", "round trip", "rate")
_SIZES, _REPEATS = (1, 2**16, 2**20), 5  # of messages


@dataclass(frozen=True, slots=True)
class SurveyedDevice:
    """A device of the file: its reported status, and the error if it cannot be used."""

    cluster: str
    device: DeviceSection
    status: DeviceStatus | None
    error: str | None

    @property
    def name(self) -> str:
        """The device's name in its cluster."""
        return self.device.name

    @property
    def address(self) -> DeviceAddress:
        """The device's name and address."""
        return DeviceAddress(self.name, str(self.device.address))

    @property
    def free(self) -> bool:
        """Whether the device can be used and is not busy."""
        return self.status is not None and self.error is None and not self.status.busy

    @property
    def busy(self) -> bool:
        """Whether the device could be used, but serves another caller."""
        return self.status is not None and self.error is None and self.status.busy


@dataclass(frozen=True, slots=True)
class Hop:
    """The hop between two ends, by their names. It has no ``trips`` if there is an ``error``, or if
    an end is ``busy`` or cannot be used."""

    source: str
    target: str
    trips: Sequence[Trip] = ()
    error: str | None = None
    busy: bool = False


def dialer_of(file: Path, section: InventorySection) -> Dialer:
    """Return a dialer with the credentials that the inventory in ``file`` names. Raises
    ``ConfigError`` if they are invalid."""
    own = load(file.parent / section.credentials) if section.credentials else None
    return Dialer(own, _ANSWER_S)


def ask_all(section: InventorySection, dialer: Dialer) -> list[list[SurveyedDevice]]:
    """Ask all devices for their status at the same time. Returns them by cluster."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = [
            [pool.submit(_surveyed, cluster.name, device, dialer) for device in cluster.devices]
            for cluster in section.clusters
        ]
        return [[each.result() for each in devices] for devices in futures]


def time_hops(
    devices: Sequence[SurveyedDevice], dialer: Dialer, sizes: Sequence[int], repeats: int
) -> list[Hop]:
    """Time messages over the hops of a cluster in the order of its pipeline, from the control unit
    and back to it.

    A device that is not free splits the pipeline in two, as does a hop that cannot be dialled.
    Raises ``StorageError`` and ``CancelledRoundError``.
    """

    def around(end: int, begin: int, error: str | None = None, busy: bool = False) -> list[Hop]:
        """The hops before device ``end`` and from device ``begin`` on, and those between."""
        before = time_hops(devices[:end], dialer, sizes, repeats)[:-1] if end else []
        after = time_hops(devices[begin:], dialer, sizes, repeats)[1:] if devices[begin:] else []
        places = range(end, begin + 1)
        between = (Hop(names[k], names[k + 1], error=error, busy=busy) for k in places)
        return [*before, *between, *after]

    names = [CONTROL_UNIT, *(each.name for each in devices), CONTROL_UNIT]
    for place, device in enumerate(devices):
        if not device.free:
            return around(place, place + 1, busy=device.busy)
    addresses, sizes = [each.address for each in devices], _fitting(devices, sizes)
    try:
        found = hop_trips(addresses, dialer, sizes, repeats)
    except (BusyDeviceError, LostDeviceError) as error:
        place, busy = names.index(error.device) - 1, isinstance(error, BusyDeviceError)
        return around(place, place + 1, None if busy else str(error), busy)
    except UnreachedError as error:
        place = names.index(error.source)
        return around(place, place, error.cause)
    except (StorageError, CancelledRoundError):
        raise
    except CollaPipeError as error:  # it names no device
        return [Hop(*ends, error=str(error)) for ends in pairwise(names)]
    return [_timed(*ends, trips) for ends, trips in zip(pairwise(names), found, strict=True)]


def _fitting(devices: Sequence[SurveyedDevice], sizes: Sequence[int]) -> list[int]:
    """Return the sizes of activations, at most what each device accepts of its neighbours."""
    memory = min(each.status.memory_bytes for each in devices if each.status)
    most = int(memory / FRAME_SHARE / 2)  # the other half is enough for a mask and a header
    return [*dict.fromkeys(min(size, most) for size in sizes)]


def _timed(source: str, target: str, trips: Sequence[Trip]) -> Hop:
    """Return the hop with its trips, or with an error if the ends' clocks contradict each other."""
    for trip_s in (each.seconds for each in trips):
        if not (math.isfinite(trip_s) and trip_s > 0):
            return Hop(source, target, error=f"its ends report a round trip of {trip_s:g} s")
    return Hop(source, target, trips)


def _surveyed(cluster: str, device: DeviceSection, dialer: Dialer) -> SurveyedDevice:
    status: DeviceStatus | None = None
    error: str | None = "has no address; set HOST:PORT of its `collapipe device`"
    if device.address is not None:
        try:
            status = ask_status(dialer, DeviceAddress(device.name, device.address))
            error = status.misfit(device.name, __version__)
        except ConfigError as cause:  # its text does not name the device
            error = str(cause)
        except CollaPipeError as cause:  # its text names the device
            return SurveyedDevice(cluster, device, None, str(cause))
    return SurveyedDevice(cluster, device, status, error and f"{device.name}: {error}")


def check(file: Path, as_json: bool) -> int:
    """Print a row per device and per hop, and errors; return 1 if one fails, else 0.

    Raises ``ConfigError`` for an invalid file or credentials.
    """
    section = yaml_file.load(file).parse(InventorySection)
    dialer = dialer_of(file, section)
    clusters = ask_all(section, dialer)
    devices = [device for each in clusters for device in each]
    found = [hop for each in clusters for hop in time_hops(each, dialer, _SIZES, _REPEATS)]
    if as_json:
        print(json.dumps(_answer(devices, found), indent=2, allow_nan=False))
    else:
        _show(devices, found)
    for each in devices:
        counted_on, gives = each.device.memory_bytes, each.status and each.status.memory_bytes
        if counted_on and gives and gives < counted_on:
            less = f"gives {amount(gives, 'B')}, the file's memory_bytes {amount(counted_on, 'B')}"
            print(f"warning: {each.name}: {less}; lower that, or raise --memory", file=sys.stderr)
    expiries = [(each.name, each.status.expires) for each in devices if each.status]
    if dialer.credentials:
        expiries.append((CONTROL_UNIT, dialer.credentials.expires))
    for name, expires in expiries:
        if expires is not None and expires_soon(expires):
            print(f"warning: {name}: certificate expires {expires:%F}; renew it", file=sys.stderr)
    errors = [each.error for each in devices if each.error]
    errors += [f"{_way(hop)}: {hop.error}" for hop in found if hop.error]
    for error in errors:
        print(f"error: {printable(error)}", file=sys.stderr)
    return 1 if errors else 0


def _show(devices: Sequence[SurveyedDevice], found: Sequence[Hop]) -> None:
    console = Console()
    print_table(console, _COLUMNS, [(each.name, *_cells(each)) for each in devices])
    console.print()
    print_table(console, _HOP_COLUMNS, [(_way(hop), *_times(hop)) for hop in found])
    lines = [
        ("speed", "products of matrices, more than training reaches; not while a device works"),
        ("rate", "one way, of messages that went there and back in the same time each way"),
    ]
    print_lines(console, lines)


def _cells(device: SurveyedDevice) -> tuple[str, ...]:
    status = device.status
    if status is None:
        return ("fails", *"------")
    speed, expires = status.flops_per_s, status.expires
    return (
        "fails" if device.error else _doing(status),
        status.version,
        status.torch_device,
        amount(status.memory_bytes, "B"),
        amount(status.free_bytes, "B"),
        amount(speed, "FLOP/s") if speed else "-",
        f"{expires:%F}" if expires else "none",
    )


def _doing(status: DeviceStatus) -> str:
    if not status.busy:
        return "idle"
    return f"unit {status.unit}: {block_range(status.span)}" if status.span else "busy"


def _times(hop: Hop) -> tuple[str, str]:
    round_trip_s, rate_bps = _measured(hop)
    if round_trip_s is None:
        return "fails" if hop.error else "busy" if hop.busy else "-", "-"
    return seconds(round_trip_s), amount(rate_bps, "bit/s") if rate_bps else "-"


def _measured(hop: Hop) -> tuple[float | None, float | None]:
    """Return the round trip of the smallest message, and the rate one way; None if the hop was not
    timed, and for the rate if only one size was timed or the size of messages has no effect."""
    if not hop.trips:
        return None, None
    byte_s = fit_hop(hop.trips).each if len(hop.trips) > 1 else 0.0
    return hop.trips[0].seconds, 2 * 8 / byte_s if byte_s else None


def _way(hop: Hop) -> str:
    return f"{hop.source} -> {hop.target}"


def _answer(devices: Sequence[SurveyedDevice], found: Sequence[Hop]) -> dict[str, Any]:
    """Return the JSON output, with fixed names because scripts read it."""
    return {
        "version": __version__,
        "devices": [
            {
                "cluster": each.cluster,
                "name": each.name,
                "address": each.device.address,
                "error": each.error,
                "status": each.status and _status(each.status),
            }
            for each in devices
        ],
        "hops": [
            {
                "source": each.source,
                "target": each.target,
                "error": each.error,
                **dict(zip(("round_trip_s", "rate_bps"), _measured(each), strict=True)),
            }
            for each in found
        ],
    }


def _status(status: DeviceStatus) -> dict[str, Any]:
    return asdict(status) | {"expires": status.expires and status.expires.isoformat()}
