"""The state of an inventory's devices and hops, as the control unit finds it."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from collapipe import __version__
from collapipe.cli.device.trial_round import LostDeviceError, Trip, hop_trips
from collapipe.credentials.credentials import Credentials, load
from collapipe.errors import CancelledRoundError, CollaPipeError, ConfigError, StorageError
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.wire.channels import DeviceAddress, Dialer
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.control_unit.placement import BusyDeviceError, UnreachedError
from pipeline.devices.messages import FRAME_SHARE, DeviceStatus

ANSWER_S = 8.0  # time in which a working device answers, also on a busy machine
CONTROL_UNIT = "control unit"
_AT_ONCE = 64


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
    for seconds in (each.seconds for each in trips):
        if not (math.isfinite(seconds) and seconds > 0):
            return Hop(source, target, error=f"its ends report a round trip of {seconds:g} s")
    return Hop(source, target, trips)


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
