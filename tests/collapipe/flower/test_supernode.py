"""A SuperNode polls often, waits longer for a busy server, and ends the tasks of ended runs."""

import time
from unittest.mock import MagicMock

import pytest
from flwr.common.constant import SubStatus
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_client, start_client_internal

from collapipe.flower import supernode


@pytest.fixture(autouse=True)
def _restore_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Flower's attributes that ``patch`` replaces."""
    for name in ("time", "pull_objects"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    timeout = fleet_http_client.HEARTBEAT_CALL_TIMEOUT
    monkeypatch.setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", timeout)


def test_a_task_fails_if_its_run_ends_while_its_message_is_pulled() -> None:
    """Otherwise the unit would wait over an hour for the message's parts and send no answers."""
    supernode.patch()
    state, store = MagicMock(), MagicMock()
    state.create_task.return_value = 5
    store.preregister.return_value = ["part"]

    def pull_object(run: int, part: str) -> bytes:
        raise RunNotRunningException

    found = start_client_internal._pull_and_store_message(
        state=state,
        object_store=store,
        node_config={},
        receive=lambda: (MagicMock(), MagicMock()),
        get_run=MagicMock(),
        get_fab=MagicMock(),
        pull_object=pull_object,
        confirm_message_received=MagicMock(),
        trusted_entities=None,
    )
    assert found is None
    ended = state.finish_task.call_args
    assert (*ended.args, ended.kwargs["sub_status"]) == (5, SubStatus.FAILED)
    assert state.delete_messages.called and store.delete.called


def test_flower_has_the_intervals_that_patch_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    timeout = fleet_http_client.HEARTBEAT_CALL_TIMEOUT
    monkeypatch.setattr(time, "sleep", slept.append)
    supernode.patch()
    assert timeout < fleet_http_client.HEARTBEAT_CALL_TIMEOUT == 20
    start_client_internal.time.sleep(3)
    start_client_internal.time.sleep(0.1)
    assert slept == [0.5, 0.1]
