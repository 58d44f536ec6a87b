"""A SuperNode polls often, gives a busy server time, and ends the tasks of runs that end."""

import time
from unittest.mock import MagicMock

import pytest
from flwr.common.constant import SubStatus
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_client, start_client_internal

from collapipe.flower import supernode


@pytest.fixture(autouse=True)
def _flower_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what ``patch`` replaces."""
    for name in ("time", "pull_objects"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    timeout = fleet_http_client.HEARTBEAT_CALL_TIMEOUT
    monkeypatch.setattr(fleet_http_client, "HEARTBEAT_CALL_TIMEOUT", timeout)


def test_a_message_of_a_run_that_ends_meanwhile_has_no_task() -> None:
    """Else the unit would wait for its parts for more than an hour, and answer nothing."""
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


def test_flower_has_the_intervals_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    timeout = fleet_http_client.HEARTBEAT_CALL_TIMEOUT
    monkeypatch.setattr(time, "sleep", slept.append)
    supernode.patch()
    assert timeout < fleet_http_client.HEARTBEAT_CALL_TIMEOUT == 20
    start_client_internal.time.sleep(3)
    start_client_internal.time.sleep(0.1)
    assert slept == [0.5, 0.1]
