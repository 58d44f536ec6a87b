"""An inventory's devices and hops, asked from the control unit: what works, and what does not."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from collapipe import __version__
from collapipe.credentials.credentials import Credentials, load
from collapipe.devices.fitting import fit
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.wire.dialing import Dialer
from collapipe.wire.inquiries import DeviceStatus, HopRequest, HopTimes
from collapipe.wire.segments import DeviceAddress
from pipeline.remote.inquiries import ask_hop, ask_status, time_trips

ANSWER_S = 8.0  # in which a device that works answers, also on a busy machine
_AT_ONCE = 64
_SOON = timedelta(days=14)
_SIZES, _REPEATS = (1, 2**16, 2**20), 5


@dataclass(frozen=True, slots=True)
class Box:
    """A device of the file: what it says of itself, or else why it cannot be used."""

    cluster: str
    device: DeviceSection
    status: DeviceStatus | None
    fault: str | None

    @property
    def neighbour(self) -> DeviceAddress:
        """Its name and address."""
        return DeviceAddress(self.device.name, str(self.device.address))


@dataclass(frozen=True, slots=True)
class Hop:
    """The way between two boxes, None for the control unit; ``times`` are missing where there is a
    ``fault``, and where one of them cannot be used or is busy."""

    source: Box | None
    target: Box | None
    times: HopTimes | None = None
    fault: str | None = None

    @property
    def round_trip_s(self) -> float | None:
        """Of the smallest message."""
        return self.times.trips[0].seconds if self.times else None

    @property
    def rate_bps(self) -> float | None:
        """One way, both ways taken for equally fast; None where size makes no difference."""
        each = fit_hop(self.times)[0] if self.times else 0.0
        return 2 * 8 / each if each else None


def fit_hop(times: HopTimes) -> tuple[float, float, float]:
    """Seconds of a byte there and back, of a message without any, and the fit's error."""
    found = fit([(t.num_bytes, 1.0) for t in times.trips], [t.seconds for t in times.trips])
    return found.each, found.fixed, found.error


def own_credentials(file: Path, section: InventorySection) -> Credentials | None:
    """Those that the inventory in ``file`` names. Raises ``ConfigError`` for bad ones."""
    return load(file.parent / section.credentials) if section.credentials else None


def ask_all(section: InventorySection, dialer: Dialer) -> list[list[Box]]:
    """The devices of each cluster, all asked at once."""
    clusters = section.clusters
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = [
            [pool.submit(_asked, each.name, device, dialer) for device in each.devices]
            for each in clusters
        ]
        return [[box.result() for box in boxes] for boxes in asked]


def hops(boxes: Sequence[Box], dialer: Dialer) -> Iterator[Hop]:
    """The hops of a cluster in the order of its pipeline, from the control unit and back to it.

    One after another, so that none disturbs another.
    """
    for source, target in pairwise((None, *boxes, None)):
        ends = [box for box in (source, target) if box is not None]
        if any(box.status is None or box.fault or box.status.busy for box in ends):
            yield Hop(source, target)
            continue
        try:
            yield Hop(source, target, time_hop(source, target, _SIZES, _REPEATS, dialer))
        except CollaPipeError as error:
            yield Hop(source, target, fault=str(error))


def time_hop(
    source: Box | None, target: Box | None, sizes: Sequence[int], repeats: int, dialer: Dialer
) -> HopTimes:
    """Messages from ``source`` to ``target`` and back; None is the control unit, which dials.

    Raises ``LinkError`` where none come back.
    """
    dialled = target or source
    assert dialled is not None
    ticket = ask_status(dialer, dialled.neighbour).ticket
    request = HopRequest(dialled.neighbour, ticket, tuple(sizes), repeats)
    if source is None or target is None:
        return time_trips(dialer, request)
    return ask_hop(dialer, source.neighbour, request)


def expires_soon(expires: datetime | None) -> bool:
    """Whether a certificate should be renewed."""
    return expires is not None and expires - datetime.now(UTC) < _SOON


def _asked(cluster: str, device: DeviceSection, dialer: Dialer) -> Box:
    if device.address is None:
        missing = "has no address; say HOST:PORT of its `collapipe device`"
        return Box(cluster, device, None, f"{device.name}: {missing}")
    try:
        status = ask_status(dialer, DeviceAddress(device.name, device.address))
    except ConfigError as error:  # of this box
        return Box(cluster, device, None, f"{device.name}: {error}")
    except CollaPipeError as error:
        return Box(cluster, device, None, str(error))
    fault = None
    if status.name != device.name:
        fault = f"{status.name} is at its address; correct name or address in the file"
    elif status.version != __version__:
        fault = f"has CollaPipe {status.version}, here is {__version__}; install the same version"
    return Box(cluster, device, status, fault and f"{device.name}: {fault}")
