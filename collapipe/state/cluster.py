"""A cluster's state before a round is planned, and the constants estimated in training."""

from dataclasses import dataclass

from collapipe.errors import ConfigError, unit_called
from collapipe.state.device import DeviceProfile, check_links
from collapipe.state.device_laws import AffineLaw
from collapipe.state.limits import MOST_DEVICES, check_count, check_each, check_kind
from collapipe.state.uplink import Uplink
from collapipe.step_law import StepLaw


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster n: its control unit, its devices and the size of its data."""

    unit: int  # n, also its partition of the data
    devices: tuple[DeviceProfile, ...]  # the K devices as the cluster lists them
    num_samples: int  # rows of the unit's shard, |D_n|
    uplink: Uplink | None = None  # None: not modelled, for strategies without channels
    real_devices: bool = False  # machines that may be lost at any time
    step: StepLaw | None = None  # measured on real devices; None before the first round
    name: str = ""  # of the unit; set by the server in requests, ignored in reports of units

    @property
    def called(self) -> str:
        """The unit's name in messages to users."""
        return unit_called(self.unit, self.name)

    def __post_init__(self) -> None:
        check_count("ClusterState: unit", self.unit)
        check_count(f"unit {self.unit}: num_samples", self.num_samples)
        check_each(f"unit {self.unit}: devices", self.devices, DeviceProfile)
        if self.uplink is not None:
            check_kind(f"unit {self.unit}: uplink", self.uplink, Uplink)
        names = {device.name for device in self.devices}
        if not 1 <= len(self.devices) <= MOST_DEVICES or len(names) < len(self.devices):
            raise ConfigError(
                f"unit {self.unit}: {len(self.devices)} devices with {len(names)} names; "
                f"1 to {MOST_DEVICES} are possible, each with a different name"
            )
        check_links(self.devices)
        if self.uplink and self.uplink.payloads:
            _check_first(self.unit, self.uplink)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of Theorem 1's constants from training; None before there is one."""

    gradient_bound: float | None = None  # φ² (assumption 2): the largest mean of a round's ‖∇F‖²
    # β (assumption 1), from below: the largest change of a round's ‖∇F‖ over the model's own change
    smoothness: float | None = None
    curvature: float | None = None  # ξ (assumption 3), from below: the smallest ‖∇F‖²/(2F), F* = 0


def unknown_cluster(unit: int, name: str = "") -> ClusterState:
    """Return a placeholder for a cluster without a valid report; it can hold no block."""
    device = DeviceProfile("unknown", AffineLaw(0.0, 0.0, 0.0, 0.0), max_blocks=0)
    return ClusterState(unit, (device,), 0, name=name)


def _check_first(unit: int, uplink: Uplink) -> None:
    """Check that the first payload is the default one and satisfies every error budget."""
    first = uplink.payloads[0]
    if first.gradient_error:
        raise ConfigError(
            f"unit {unit}: the first payload has gradient_error={first.gradient_error}; it must "
            "be 0, so that any budget can be kept"
        )
    if first.bits != (uplink.model_bits, uplink.activation_bits):
        raise ConfigError(
            f"unit {unit}: the first payload has {first.model_bits} and {first.activation_bits} "
            f"bits, the uplink {uplink.model_bits} and {uplink.activation_bits}; they must be alike"
        )
