"""The devices of a cluster, and how to plan again without lost devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collapipe.plan import ClusterPlan
from collapipe.wire.channels import Channels, DeviceAddress


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a cluster, and how to reach them."""

    devices: Mapping[str, DeviceAddress]
    channels: Channels
    # Makes a plan without the given lost devices (name → cause). Raises an error if there is no
    # such plan.
    replan: Callable[[Mapping[str, str]], ClusterPlan]
    hung_s: Callable[[ClusterPlan], float]  # after this time in one action a device counts as hung
    # tensors between devices go through the control unit, so that devices do not dial each other
    relay: bool = False
    # Planned bytes for a number of blocks, the part of the micro-batches that are kept at the same
    # time, a part of each micro-batch's rows, the number of blocks' gradients beyond one set, and
    # whether the device recomputes; it refuses more than it offers.
    needed_bytes: Callable[[int, float, float, int, bool], float] = lambda *_: 0.0
    # seconds until a device that serves another caller is an error; None: lost after ``hung_s``
    busy_s: float | None = None
