"""Flower's waits between retries are shortened, and lost heartbeats count as failed."""

import time
from collections.abc import Iterator
from unittest.mock import Mock, patch

import httpx
import pytest
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    pull_objects,
)

from collapipe.flower import runtime
from collapipe.flower.runtime import beating, wait_briefly

PULLS = pull_objects, pull_and_inflate_object_from_tree


@pytest.fixture(autouse=True)
def restore_flowers_waits() -> Iterator[None]:
    with patch.dict(PULLS[0].__kwdefaults__), patch.dict(PULLS[1].__kwdefaults__):
        yield


def test_flower_has_the_waits_that_we_shorten() -> None:
    assert all("initial_backoff" in pull.__kwdefaults__ for pull in PULLS)
    wait_briefly()
    assert [pull.__kwdefaults__["initial_backoff"] for pull in PULLS] == [0.05, 0.05]


def test_an_object_that_is_not_yet_available_is_requested_again_soon() -> None:
    answers = [ObjectUnavailableError("a"), b"there"]

    def fetch(_: str) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    wait_briefly()
    began = time.monotonic()
    assert pull_objects(["a"], fetch) == {"a": b"there"}
    assert time.monotonic() - began < 0.7  # Flower's own first wait is 0.8 s or more


@pytest.mark.parametrize(
    ("error", "succeeds"),
    [
        (None, True),
        (401, True),  # the next request reports the error
        (503, False),
        (504, False),
        (httpx.ConnectError("refused"), False),
        (httpx.ReadTimeout("late"), False),
    ],
)
def test_a_heartbeat_that_did_not_arrive_is_reported_as_failed(
    error: httpx.HTTPError | int | None, succeeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(error, int):
        request, answer = httpx.Request("POST", "http://127.0.0.1"), httpx.Response(error)
        error = httpx.HTTPStatusError(str(error), request=request, response=answer)
    sender, client = Mock(), Mock(**{"SendTaskHeartbeat.side_effect": error})
    monkeypatch.setattr(runtime, "HeartbeatSender", sender)
    with beating(client):
        beat = sender.call_args.args[0]
        assert beat() is succeeds
