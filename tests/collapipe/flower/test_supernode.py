"""A SuperNode polls often, and gives a busy server time."""

import time

import pytest
from flwr.supernode import fleet_http_client, start_client_internal

from collapipe.flower import supernode


def test_flower_has_the_intervals_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    timeout = fleet_http_client.HEARTBEAT_CALL_TIMEOUT
    monkeypatch.setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", timeout)
    monkeypatch.setattr(time, "sleep", slept.append)
    supernode.patch()
    assert timeout < fleet_http_client.HEARTBEAT_CALL_TIMEOUT == 20
    start_client_internal.time.sleep(3)
    start_client_internal.time.sleep(0.1)
    assert slept == [0.5, 0.1]
