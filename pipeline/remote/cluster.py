"""The devices of a cluster, and what is done without those that are lost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from collapipe.plan import ClusterPlan
from collapipe.wire.dialing import Dialer
from collapipe.wire.segments import DeviceAddress


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices that there are, and how to reach them.

    ``replan`` makes a plan without the devices that it is given, each with the cause of its loss;
    it raises where there is none. ``hung_s`` is how long one action of a plan's device may take.
    With ``relay`` devices do not dial each other: what one hands to the next goes through the
    control unit. ``needed_bytes`` is what a number of blocks is planned to need of a device, which
    refuses more than it gives.
    """

    devices: Mapping[str, DeviceAddress]
    dialer: Dialer
    replan: Callable[[Mapping[str, str]], ClusterPlan]
    hung_s: Callable[[ClusterPlan], float]
    relay: bool = False
    needed_bytes: Callable[[int], float] = lambda blocks: 0.0
