"""Check an inventory's devices and hops from the control unit."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from collapipe import __version__
from collapipe.credentials.credentials import Credentials, load
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.wire.dialing import Dialer
from collapipe.wire.inquiries import DeviceStatus, HopRequest, HopTimes
from collapipe.wire.segments import DeviceAddress
from pipeline.remote.inquiries import ask_hop, ask_status, time_trips

ANSWER_S = 8.0  # time in which a working device answers, also on a busy machine
CONTROL_UNIT = "control unit"
_AT_ONCE = 64
_PAUSE_S = 0.1
_SIZES, _REPEATS = (1, 2**16, 2**20), 5


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


@dataclass(frozen=True, slots=True)
class Hop:
    """The hop between two ends, by their names. Times are missing if there is an ``error``, or if
    an end cannot be used or is busy."""

    source: str
    target: str
    error: str | None = None
    round_trip_s: float | None = None  # for the smallest message
    rate_bps: float | None = None  # one way, half of the round trip; None if size has no effect


def fit_hop(times: HopTimes) -> Fit:
    """Fit a round trip's seconds per byte, and per message without bytes."""
    return fit([(t.num_bytes, 1.0) for t in times.trips], [t.seconds for t in times.trips])


def own_credentials(file: Path, section: InventorySection) -> Credentials | None:
    """Load the credentials that the inventory in ``file`` names. Raises ``ConfigError`` if they are
    invalid."""
    return load(file.parent / section.credentials) if section.credentials else None


def ask_all(section: InventorySection, dialer: Dialer) -> list[list[SurveyedDevice]]:
    """Ask all devices for their status at the same time. Returns them by cluster."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = [
            [pool.submit(_asked, cluster.name, device, dialer) for device in cluster.devices]
            for cluster in section.clusters
        ]
        return [[each.result() for each in devices] for devices in asked]


def hops(devices: Sequence[SurveyedDevice], dialer: Dialer) -> Iterator[Hop]:
    """Time the hops of a cluster in the order of its pipeline, from the control unit and back to
    it.

    Hops are timed one after another, so that they do not disturb each other.
    """
    for source, target in pairwise((None, *devices, None)):
        way = Hop(_name(source), _name(target))
        used = [each for each in (source, target) if each is not None]
        if any(each.status is None or each.error or each.status.busy for each in used):
            yield way
            continue
        try:
            times = time_hop(source, target, _SIZES, _REPEATS, dialer)
        except CollaPipeError as error:
            yield replace(way, error=str(error))
            continue
        byte_s = fit_hop(times).each
        rate_bps = 2 * 8 / byte_s if byte_s else None
        yield replace(way, round_trip_s=times.trips[0].seconds, rate_bps=rate_bps)


def time_hop(
    source: SurveyedDevice | None,
    target: SurveyedDevice | None,
    sizes: Sequence[int],
    repeats: int,
    dialer: Dialer,
) -> HopTimes:
    """Time messages from ``source`` to ``target`` and back. None is the control unit, which dials
    the other end.

    Raises ``LinkError`` if no message comes back.
    """
    ends = [each.address for each in (source, target) if each is not None]
    ticket = [_free(dialer, end).ticket for end in ends][-1]
    request = HopRequest(ends[-1], ticket, tuple(sizes), repeats)
    if source is None or target is None:
        return time_trips(dialer, request)
    return ask_hop(dialer, source.address, request)


def _free(dialer: Dialer, device: DeviceAddress) -> DeviceStatus:
    """Poll a device until it is idle, for at most ``ANSWER_S``. Returns its last status."""
    until = time.monotonic() + ANSWER_S
    status = ask_status(dialer, device)
    while status.busy and time.monotonic() < until:
        time.sleep(_PAUSE_S)
        status = ask_status(dialer, device)
    return status


def _name(end: SurveyedDevice | None) -> str:
    return end.name if end else CONTROL_UNIT


def _asked(cluster: str, device: DeviceSection, dialer: Dialer) -> SurveyedDevice:
    status: DeviceStatus | None = None
    error: str | None = "has no address; set HOST:PORT of its `collapipe device`"
    if device.address is not None:
        try:
            status = ask_status(dialer, DeviceAddress(device.name, device.address))
            error = _misfit(device, status)
        except ConfigError as cause:  # its text does not name the device
            error = str(cause)
        except CollaPipeError as cause:  # its text names the device
            return SurveyedDevice(cluster, device, None, str(cause))
    return SurveyedDevice(cluster, device, status, error and f"{device.name}: {error}")


def _misfit(device: DeviceSection, status: DeviceStatus) -> str | None:
    """Return why the device at the address is another one or has another version, else None."""
    if status.name != device.name:
        return f"its address belongs to {status.name}; correct name or address in the file"
    if status.version != __version__:
        return f"has CollaPipe {status.version}, here is {__version__}; install the same version"
    return None
