"""A daemon's status: its content and the callers that may request it."""

import json
import math
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from device_cluster import UNIT, Work, daemons, neighbours, plan_of
from second_device import NAME, ran, second_device

from collapipe import __version__
from collapipe.credentials.credentials import load
from collapipe.errors import LinkError, WireError
from collapipe.plan import Span
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Dialer
from pipeline.devices.control_unit.connection import ask_status
from pipeline.devices.daemon import server
from pipeline.devices.daemon.server import Daemon, DeviceSettings
from pipeline.devices.encoding import as_json, from_json
from pipeline.devices.messages import DeviceStatus

OPEN = Dialer(None)


@pytest.fixture(params=["insecure", "credentials"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Dialer, DeviceAddress, DeviceAddress]]:
    """A control unit's dialer and two devices."""
    folder = tmp_path / "own" if request.param == "credentials" else None
    with daemons(2, folder=folder) as there:
        dialer = Dialer(load(folder / "control-unit")) if folder else OPEN
        yield dialer, *neighbours(there)


def test_the_status_of_an_idle_device(pair: tuple[Dialer, DeviceAddress, DeviceAddress]) -> None:
    dialer, device, _ = pair
    status = ask_status(dialer, device)
    assert (status.name, status.version) == ("device-0", __version__)
    assert (status.torch_version, status.torch_device) == (torch.__version__, "cpu")
    assert (status.memory_bytes, status.threads) == (1e9, torch.get_num_threads())
    assert status.free_bytes > 0 and status.flops_per_s is not None and status.flops_per_s > 0
    assert (status.busy, status.unit, status.span) == (False, None, None)
    if dialer.credentials is None:
        assert status.expires is None
    else:
        assert status.expires is not None
        assert timedelta(29) < status.expires - datetime.now(UTC) < timedelta(31)


def test_the_status_names_and_measures_the_torch_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_GPU_SIDE", 8)
    with second_device() as second:
        settings = DeviceSettings("device-0", "127.0.0.1:0", 1e9, second)
        with Daemon(settings, None) as there:
            status = ask_status(OPEN, *neighbours([there]))
    assert (status.torch_device, "mm" in ran) == (NAME, True)
    assert status.flops_per_s is not None and status.flops_per_s > 0


def test_the_status_reports_the_free_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", {second: (5, 9)}.__getitem__)
    monkeypatch.setattr(server, "_flops_per_s", {second: 7.0}.__getitem__)
    daemon = Daemon(DeviceSettings("device-0", "127.0.0.1:0", 1e9, second), None)
    status = from_json(DeviceStatus, daemon._status(b"", Mock()))
    assert (status.torch_device, status.free_bytes, status.flops_per_s) == ("cuda:1", 5, 7)


@pytest.mark.parametrize(
    "lie",
    [
        {"expires": "2030-01-01T00:00:00"},  # no time zone
        {"flops_per_s": math.nan},
        {"memory_bytes": math.inf},
        {"free_bytes": -1.0},
    ],
    ids=str,
)
def test_a_status_with_impossible_values_is_refused(lie: dict[str, Any]) -> None:
    with daemons(1) as there:
        honest = json.loads(as_json(ask_status(OPEN, *neighbours(there))))
    assert from_json(DeviceStatus, json.dumps(honest).encode()).name == "device-0"
    with pytest.raises(WireError):
        from_json(DeviceStatus, json.dumps(honest | lie).encode())


def test_a_device_that_does_not_answer_times_out(tmp_path: Path) -> None:
    """With and without TLS: a server that accepts connections and never replies."""
    with daemons(1, folder=tmp_path / "own"), socket.create_server(("127.0.0.1", 0)) as silent:
        hung = DeviceAddress("device-0", f"127.0.0.1:{silent.getsockname()[1]}")
        own = load(tmp_path / "own/control-unit")
        for dialer in (Dialer(own, 0.5), Dialer(None, 0.5)):
            began = time.monotonic()
            with pytest.raises(LinkError, match="device-0"):
                ask_status(dialer, hung)
            assert time.monotonic() - began < 10


def test_a_device_may_not_request_the_status_of_another(tmp_path: Path) -> None:
    with daemons(2, folder=tmp_path / "own") as there:
        other = Dialer(load(tmp_path / "own/device-1"))
        with pytest.raises(LinkError, match="UNAUTHENTICATED"):
            ask_status(other, neighbours(there)[0])


def test_the_status_of_a_busy_device_names_its_unit_and_blocks() -> None:
    plan = plan_of(["device-0", "device-1"], (3, 1))
    with daemons(2) as there, Work().segments(plan, there):
        status = ask_status(OPEN, neighbours(there)[1])
        assert (status.busy, status.unit, status.span) == (True, UNIT, Span(3, 1))
        assert status.flops_per_s is None
