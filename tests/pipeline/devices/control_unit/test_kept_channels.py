"""Channels to devices stay open between rounds; broken channels are dialled again."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from device_cluster import INSECURE, Work, daemons, device_name, plan_of
from made_cluster import Cluster

from collapipe.credentials.member import Role
from collapipe.errors import LinkError, StageError
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Channels, Dialer
from pipeline.devices.control_unit.connection import DeviceConnection
from pipeline.devices.daemon.server import Daemon, DeviceSettings
from pipeline.devices.messages import CONTROL

NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices to which the control unit or another device has opened channels."""
    names, real = list[str](), Dialer.pinned

    def noted(dialer: Dialer, device: str, address: str) -> tuple[grpc.Channel, bytes | None]:
        names.append(device)
        return real(dialer, device, address)

    monkeypatch.setattr(Dialer, "pinned", noted)
    return names


@pytest.fixture
def kept() -> Iterator[Channels]:
    with Channels(INSECURE) as channels:
        yield channels


def test_a_second_round_dials_no_device(kept: Channels, dialled: list[str]) -> None:
    work = Work()
    with daemons(3) as there:
        first = work.remote(PLAN, there, kept=kept)
        # three control streams, two hops, and two channels between neighbours
        assert len(dialled) == 7
        second = work.remote(PLAN, there, kept=kept)
    assert len(dialled) == 7
    assert first.equals(second)


def test_a_restarted_device_is_dialled_again(kept: Channels) -> None:
    work = Work()
    with daemons(3) as there, ExitStack() as stack:
        expected = work.remote(PLAN, there, kept=kept)
        there[1].__exit__()
        settings = DeviceSettings(NAMES[1], there[1].address, 1e9)
        there[1] = stack.enter_context(Daemon(settings, None))
        assert work.remote(PLAN, there, kept=kept).equals(expected)


def test_a_device_that_stopped_between_rounds_is_lost_within_10_seconds(kept: Channels) -> None:
    work = Work()
    with daemons(3) as there:
        expected = work.remote(PLAN, there, kept=kept)
        there[1].__exit__()
        began = time.monotonic()
        assert work.remote(PLAN, there, kept=kept, lost=[NAMES[1]]).equals(expected)
        assert time.monotonic() - began < 10


def test_a_revoked_device_is_not_reached_over_a_kept_channel(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    jetson, boss = cluster.member(), cluster.member("boss", Role.CONTROL_UNIT)
    with (
        Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon,
        Channels(Dialer(boss)) as channels,
    ):
        device, arrived = DeviceAddress("jetson", daemon.address), threading.Event()
        channels.stream(device, CONTROL, 2**20, arrived).close()
        cluster.revoke(jetson.member)
        with pytest.raises(LinkError, match="revoked"):
            channels.stream(device, CONTROL, 2**20, arrived)


def test_a_device_that_is_revoked_during_a_round_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.devices.daemon.session.ALIVE_S", 0.05)
    cluster, arrived = Cluster(tmp_path), threading.Event()
    jetson, boss = cluster.member(), cluster.member("boss", Role.CONTROL_UNIT)
    with (
        Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon,
        Channels(Dialer(boss)) as channels,
    ):
        device = DeviceAddress("jetson", daemon.address)
        connection = DeviceConnection(device, channels, arrived, lambda *_: None, 2**20)
        assert arrived.wait(10)
        connection.check(hung_s=60)
        cluster.revoke(jetson.member)
        ends = time.monotonic() + 10
        while connection.broken is None and time.monotonic() < ends:
            time.sleep(0.02)
        with pytest.raises(StageError, match="revoked"):
            connection.check(hung_s=60)
        connection.drop()


def test_a_device_with_a_renewed_certificate_is_dialled_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    boss, arrived = cluster.member("boss", Role.CONTROL_UNIT), threading.Event()
    settings = DeviceSettings("jetson", "127.0.0.1:0", 1e9)
    with Channels(Dialer(boss)) as channels:
        with Daemon(settings, cluster.member()) as daemon:
            device = DeviceAddress("jetson", daemon.address)
            channels.stream(device, CONTROL, 2**20, arrived).close()
        with Daemon(replace(settings, listen=daemon.address), cluster.member()):
            channels.stream(device, CONTROL, 2**20, arrived).close()
