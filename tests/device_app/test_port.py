"""Who is refused at a daemon's port, by whatever method, before the daemon hears a word."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from made_cluster import Cluster

from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Role, dns_name
from collapipe.wire.inquiries import PROBE, STATUS, TIME_HOP
from collapipe.wire.segments import CONTROL, HOP
from device_app.daemon import Daemon, DeviceSettings

AGO = timedelta(hours=-1)
STREAMS, QUESTIONS = (CONTROL, HOP, PROBE), (STATUS, TIME_HOP)
Caller = Callable[[Cluster, Cluster], Credentials | None]


def _nobody(cluster: Cluster, others: Cluster) -> None:
    return None


def _stranger(cluster: Cluster, others: Cluster) -> Credentials:
    return others.member("boss", Role.CONTROL_UNIT)


def _expired(cluster: Cluster, others: Cluster) -> Credentials:
    return cluster.member("boss", Role.CONTROL_UNIT, expires_in=AGO)


def _revoked(cluster: Cluster, others: Cluster) -> Credentials:
    thief = cluster.member("boss", Role.CONTROL_UNIT)
    cluster.revoke(thief.member)
    return thief


def _device(cluster: Cluster, others: Cluster) -> Credentials:
    return cluster.member("pi")


def ended(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """How a call ends."""
    with pytest.raises(grpc.RpcError) as error:
        if method in STREAMS:
            next(channel.stream_stream(method)(iter([b"\1nothing"]), timeout=60))
        else:
            channel.unary_unary(method)(b"", timeout=60)
    code: grpc.StatusCode = error.value.code()
    return code


@pytest.mark.parametrize(
    ("caller", "refused", "code"),
    [
        (_nobody, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_stranger, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_expired, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_revoked, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAUTHENTICATED),
        (_device, (CONTROL, *QUESTIONS), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_a_daemon_refuses(
    caller: Caller,
    refused: tuple[str, ...],
    code: grpc.StatusCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, others = Cluster(tmp_path / "own"), Cluster(tmp_path / "others")
    jetson = cluster.member()
    came = caller(cluster, others)
    served = list[object]()
    for method in ("_control", "_hop", "_probe"):
        monkeypatch.setattr(Daemon, method, lambda *heard: served.append(heard))
    shown = (came.key, came.certificate) if came else ()
    with Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon:
        wanted = ("grpc.ssl_target_name_override", dns_name("jetson", Role.DEVICE))
        credentials = grpc.ssl_channel_credentials(jetson.authority, *shown)
        with grpc.secure_channel(daemon.address, credentials, options=[wanted]) as channel:
            assert [ended(channel, method) for method in refused] == [code] * len(refused)
        with grpc.insecure_channel(daemon.address) as channel:
            assert ended(channel, STATUS) == grpc.StatusCode.UNAVAILABLE
    assert served == []
