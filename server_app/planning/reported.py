"""Reported clusters: whether a run can plan them, and whether they have changed."""

from dataclasses import replace

from collapipe.config import Settings
from collapipe.state import ClusterState
from collapipe.wire.messages import Failure
from server_app.planning.payloads import allows, payload_options
from server_app.roster import Reported


def plannable(reported: Reported, settings: Settings, num_channels: int) -> Reported:
    """Return the cluster without its name, because a unit may report any name. Return a failure if
    its uplink has not this run's number of channels or offers other payloads."""
    if isinstance(reported, Failure):
        return reported
    step = reported.step if reported.real_devices else None
    reported = replace(reported, name="", step=step)
    if reported.uplink is None:
        return reported
    gains, offered = len(reported.uplink.gains), reported.uplink.payloads
    if gains != num_channels:
        return Failure("WireError", f"reported {gains} channel gains, expected {num_channels}")
    allowed = all(allows(settings, each) for each in offered)
    if allowed and settings.chooses_payloads == bool(offered):
        return reported
    names = ", ".join("/".join(map(str, each.choice)) for each in offered[:3])
    return Failure(
        "WireError",
        f"offers activations, uploads and heads {names or 'without a choice'}, expected "
        f"{', '.join(payload_options(settings))}",
    )


def with_times(cluster: ClusterState, then: ClusterState) -> ClusterState:
    """Return a cluster of real devices with the measured times that it had ``then``."""
    if not (cluster.real_devices and then.real_devices):
        return cluster
    times = {device.name: device.time for device in then.devices}
    devices = (replace(each, time=times.get(each.name, each.time)) for each in cluster.devices)
    return replace(cluster, devices=tuple(devices), step=then.step)


def same_cluster(then: ClusterState, now: ClusterState) -> bool:
    """Whether a unit's cluster has not changed. Real devices are compared by their names, because
    their speeds and free memory are measured anew."""
    names = [[device.name for device in each.devices] for each in (then, now)]
    if then.real_devices and names[0] == names[1]:
        now = replace(now, devices=then.devices, step=then.step)
    return then == now
