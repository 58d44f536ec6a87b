"""An inventory's devices and hops, asked from the control unit: what works, and what does not."""

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

ANSWER_S = 8.0  # in which a device that works answers, also on a busy machine
CONTROL_UNIT = "control unit"
_AT_ONCE = 64
_PAUSE_S = 0.1
_SIZES, _REPEATS = (1, 2**16, 2**20), 5


@dataclass(frozen=True, slots=True)
class SurveyedDevice:
    """A device of the file: what it says of itself, or else why it cannot be used."""

    cluster: str
    device: DeviceSection
    status: DeviceStatus | None
    error: str | None

    @property
    def name(self) -> str:
        """By which its cluster knows it."""
        return self.device.name

    @property
    def address(self) -> DeviceAddress:
        """Its name and address."""
        return DeviceAddress(self.name, str(self.device.address))


@dataclass(frozen=True, slots=True)
class Hop:
    """The way between two ends, by their names; times are missing where there is an ``error``, and
    where one of them cannot be used or is busy."""

    source: str
    target: str
    error: str | None = None
    round_trip_s: float | None = None  # of the smallest message
    rate_bps: float | None = None  # one way, both taken for equally fast; None: any size is as fast


def fit_hop(times: HopTimes) -> Fit:
    """Seconds of a byte there and back, and of a message without any."""
    return fit([(t.num_bytes, 1.0) for t in times.trips], [t.seconds for t in times.trips])


def own_credentials(file: Path, section: InventorySection) -> Credentials | None:
    """Those that the inventory in ``file`` names. Raises ``ConfigError`` for bad ones."""
    return load(file.parent / section.credentials) if section.credentials else None


def ask_all(section: InventorySection, dialer: Dialer) -> list[list[SurveyedDevice]]:
    """The devices of each cluster, all asked at once."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        asked = [
            [pool.submit(_asked, cluster.name, device, dialer) for device in cluster.devices]
            for cluster in section.clusters
        ]
        return [[each.result() for each in devices] for devices in asked]


def hops(devices: Sequence[SurveyedDevice], dialer: Dialer) -> Iterator[Hop]:
    """The hops of a cluster in the order of its pipeline, from the control unit and back to it.

    One after another, so that none disturbs another.
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
    """Messages from ``source`` to ``target`` and back; None is the control unit, which dials.

    Raises ``LinkError`` where none come back.
    """
    ends = [each.address for each in (source, target) if each is not None]
    ticket = [_free(dialer, end).ticket for end in ends][-1]
    request = HopRequest(ends[-1], ticket, tuple(sizes), repeats)
    if source is None or target is None:
        return time_trips(dialer, request)
    return ask_hop(dialer, source.address, request)


def _free(dialer: Dialer, device: DeviceAddress) -> DeviceStatus:
    """Its status once it has let go of a control unit that has just left, or else after a while."""
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
    error: str | None = "has no address; say HOST:PORT of its `collapipe device`"
    if device.address is not None:
        try:
            status = ask_status(dialer, DeviceAddress(device.name, device.address))
            error = _misfit(device, status)
        except ConfigError as cause:  # of this device
            error = str(cause)
        except CollaPipeError as cause:  # which names it
            return SurveyedDevice(cluster, device, None, str(cause))
    return SurveyedDevice(cluster, device, status, error and f"{device.name}: {error}")


def _misfit(device: DeviceSection, status: DeviceStatus) -> str | None:
    """Why it is not the device that is meant, or of no use here."""
    if status.name != device.name:
        return f"{status.name} is at its address; correct name or address in the file"
    if status.version != __version__:
        return f"has CollaPipe {status.version}, here is {__version__}; install the same version"
    return None
