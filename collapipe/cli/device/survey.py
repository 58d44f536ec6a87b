"""The state of an inventory's devices and hops, as the control unit finds it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from collapipe import __version__
from collapipe.cli.device.trial_round import LostDeviceError, Trip, hop_trips
from collapipe.credentials.credentials import Credentials, load
from collapipe.errors import CollaPipeError, ConfigError
from collapipe.inventory.schema import DeviceSection, InventorySection
from collapipe.wire.channels import DeviceAddress, Dialer
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.control_unit.placement import UnreachedError
from pipeline.devices.messages import DeviceStatus

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


@dataclass(frozen=True, slots=True)
class Hop:
    """The hop between two ends, by their names. It has no ``trips`` if there is an ``error``, or if
    an end cannot be used or is busy."""

    source: str
    target: str
    trips: Sequence[Trip] = ()
    error: str | None = None


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
    """

    def around(end: int, begin: int, error: str | None) -> list[Hop]:
        """The hops before device ``end`` and from device ``begin`` on, and those between."""
        before = time_hops(devices[:end], dialer, sizes, repeats)[:-1] if end else []
        after = time_hops(devices[begin:], dialer, sizes, repeats)[1:] if devices[begin:] else []
        places = range(end, begin + 1)
        return [*before, *(Hop(names[k], names[k + 1], error=error) for k in places), *after]

    names = [CONTROL_UNIT, *(each.name for each in devices), CONTROL_UNIT]
    for place, device in enumerate(devices):
        if not device.free:
            return around(place, place + 1, None)
    try:
        trips = hop_trips([each.address for each in devices], dialer, sizes, repeats)
    except LostDeviceError as error:
        place = names.index(error.device) - 1
        return around(place, place + 1, str(error))
    except UnreachedError as error:
        place = names.index(error.source)
        return around(place, place, error.cause)
    return [Hop(names[k], names[k + 1], each) for k, each in enumerate(trips)]


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
