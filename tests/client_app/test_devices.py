"""A unit's devices: what the server is told of them, and what another process goes on from."""

from types import SimpleNamespace
from typing import Any

import pytest

from client_app.devices import DevicePipeline, Devices
from collapipe.devices.slowness import Slowness
from collapipe.errors import RoundFailedError
from collapipe.report import DeviceReport
from collapipe.state import AffineLaw
from collapipe.wire.channels import DeviceAddress

LAW = AffineLaw(0.0, 1.0, 0.0, 0.0)  # a second a block


def devices(profile: bool | None = None) -> Devices:
    """Two, of which nobody has asked anything yet."""
    roster = [DeviceAddress(name, f"{name}.home:7700") for name in ("jetson", "pi")]
    cluster: Any = SimpleNamespace(roster=lambda unit: roster, credentials=None)
    settings: Any = SimpleNamespace(pipeline=SimpleNamespace(profile=profile, relay=False))
    return Devices(settings, cluster, 0)


def report(name: str, chunk_s: float) -> DeviceReport:
    """Of one block."""
    return DeviceReport(name, 1, chunk_s, *[0.0] * 6)


def test_another_process_plans_as_the_one_before_it() -> None:
    first, second = devices(), devices()
    events = [
        *first.learn([report("jetson", 4.0), report("pi", 1.1)], {"jetson": LAW, "pi": LAW}, 1)
    ]
    assert len(events) == 1 and first.slowness == Slowness({"jetson": 4.0})
    second.recall(first.slowness.pack() | Slowness({"sold": 2.0}).pack())
    assert second.slowness == first.slowness
    second.recall({})
    assert second.slowness == Slowness()


def test_laws_that_stay_as_they_are_described_are_never_changed() -> None:
    own = devices(profile=False)
    assert not [*own.learn([report("pi", 4.0)], {"pi": LAW}, 1)]
    own.recall(Slowness({"pi": 2.0}).pack())
    assert own.slowness == Slowness()


def test_the_error_of_a_unit_without_devices_has_no_address() -> None:
    own: Any = SimpleNamespace(_all=devices(), _devices={}, _plan=SimpleNamespace(unit=0))
    own._all.absent = {"pi": "device pi at pi.home:7700: timed out"}
    with pytest.raises(RoundFailedError, match="jetson") as failed:
        DevicePipeline._replan(own, {"jetson": "UNAVAILABLE: ipv4:10.0.0.5:7700: Socket closed"})
    assert "timed out" in str(failed.value)
    assert not any(each in str(failed.value) for each in ("pi.home", "10.0.0.5", "7700"))
