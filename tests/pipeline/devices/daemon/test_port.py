"""A daemon's port refuses unauthorised callers before any method runs."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import grpc
import pytest
from made_cluster import Cluster

from collapipe.credentials import credentials, verified_channel
from collapipe.credentials.credentials import Credentials
from collapipe.credentials.member import Role, dns_name
from collapipe.errors import LinkError
from collapipe.wire.streams.channels import Dialer, open_stream
from pipeline.devices.daemon.server import Daemon, DeviceSettings
from pipeline.devices.messages import CONTROL, HOP, STATUS

AGO = timedelta(hours=-1)
UNIT = Role.CONTROL_UNIT
STREAMS, QUESTIONS = (CONTROL, HOP), (STATUS,)
Caller = Callable[[Cluster, Cluster], Credentials | None]


def _without_certificate(cluster: Cluster, others: Cluster) -> None:
    return None


def _of_another_authority(cluster: Cluster, others: Cluster) -> Credentials:
    return others.member("boss", Role.CONTROL_UNIT)


def _expired_certificate(cluster: Cluster, others: Cluster) -> Credentials:
    return cluster.member("boss", Role.CONTROL_UNIT, expires_in=AGO)


def _revoked_certificate(cluster: Cluster, others: Cluster) -> Credentials:
    thief = cluster.member("boss", Role.CONTROL_UNIT)
    cluster.revoke(thief.member)
    return thief


def _device_certificate(cluster: Cluster, others: Cluster) -> Credentials:
    return cluster.member("pi")


def ended(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """The status code with which the call fails."""
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
        (_without_certificate, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_of_another_authority, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_expired_certificate, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAVAILABLE),
        (_revoked_certificate, (*STREAMS, *QUESTIONS), grpc.StatusCode.UNAUTHENTICATED),
        (_device_certificate, (CONTROL, *QUESTIONS), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_unauthorised_callers_are_refused(
    caller: Caller,
    refused: tuple[str, ...],
    code: grpc.StatusCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, others = Cluster(tmp_path / "own"), Cluster(tmp_path / "others")
    jetson = cluster.member()
    identity = caller(cluster, others)
    served = list[object]()
    for method in ("_control", "_hop", "_status"):
        monkeypatch.setattr(Daemon, method, lambda *arguments: served.append(arguments))
    shown = (identity.key, identity.certificate) if identity else ()
    with Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon:
        wanted = ("grpc.ssl_target_name_override", dns_name("jetson", Role.DEVICE))
        credentials = grpc.ssl_channel_credentials(jetson.authority, *shown)
        with grpc.secure_channel(daemon.address, credentials, options=[wanted]) as channel:
            assert [ended(channel, method) for method in refused] == [code] * len(refused)
        with grpc.insecure_channel(daemon.address) as channel:
            assert ended(channel, STATUS) == grpc.StatusCode.UNAVAILABLE
    assert served == []


def test_unauthorised_calls_without_a_request_do_not_hold_threads(tmp_path: Path) -> None:
    """A device may not ask for the status; the control unit must still find a free thread."""
    cluster = Cluster(tmp_path)
    jetson, pi, boss = cluster.member(), cluster.member("pi"), cluster.member("boss", UNIT)
    with Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon:
        with Dialer(pi).channel("jetson", daemon.address) as channel:
            silence = queue.SimpleQueue[bytes]()
            for _ in range(20):
                call = channel.stream_stream(STATUS)(iter(silence.get, b""))
                assert call.code() == grpc.StatusCode.UNAUTHENTICATED
        silence.put(b"")
        with Dialer(boss).channel("jetson", daemon.address) as channel:
            assert channel.unary_unary(STATUS)(b"", timeout=60)


def test_calls_of_a_silent_control_unit_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each holds a thread of the daemon until its message arrives."""
    monkeypatch.setattr(verified_channel, "_MESSAGE_S", 0.1)
    cluster = Cluster(tmp_path)
    jetson, boss = cluster.member(), cluster.member("boss", UNIT)
    with (
        Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon,
        Dialer(boss).channel("jetson", daemon.address) as channel,
    ):
        silence = queue.SimpleQueue[bytes]()
        silent = channel.stream_unary(STATUS).future(iter(silence.get, b""), timeout=20)
        assert silent.code() == grpc.StatusCode.CANCELLED
        silence.put(b"")
        monkeypatch.setattr(verified_channel, "_MESSAGE_S", 60)
        empty = channel.stream_unary(STATUS).future(iter(()), timeout=60)
        assert empty.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_silent_control_unit_that_is_not_admitted_any_more_loses_its_session(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cluster, long = Cluster(tmp_path), timedelta(hours=9)
    jetson = cluster.member(expires_in=long)
    thief, boss = cluster.member("thief", UNIT), cluster.member("boss", UNIT, expires_in=long)
    with Daemon(DeviceSettings("jetson", "127.0.0.1:0", 1e9), jetson) as daemon:
        with Dialer(thief).channel("jetson", daemon.address) as channel:
            held = open_stream(channel, CONTROL, "jetson", 2**20, threading.Event())
            if how == "revoked":
                cluster.revoke(thief.member)
            else:
                monkeypatch.setattr(credentials, "datetime", Later)
            with pytest.raises(LinkError):
                for _ in range(10):  # signs of life, one a second
                    held.receive(60)
            assert {"revoked": "was revoked", "expired": "is valid from"}[how] in caplog.text
        with Dialer(boss).channel("jetson", daemon.address) as channel:
            deadline = time.monotonic() + 60
            while b'"busy":true' in channel.unary_unary(STATUS)(b"", timeout=60):
                assert time.monotonic() < deadline


class Later(datetime):
    """The time in two hours."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(hours=2)
