"""A run has exactly one process, even if the process starts slowly."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from flwr.common.constant import Status, SubStatus
from flwr.proto.runtime_pb2 import PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.superlink.cli import flower_superlink

from collapipe.flower import runtime, superexec, superlink

SPEC = {
    "task_type": TaskType.SERVER_APP,
    "runtime_api_address": "127.0.0.1:1",
    "insecure": True,
    "root_certificates_path": None,
    "runtime_dependency_install": False,
    "parent_pid": os.getpid(),
    "suppress_output": True,
}


class Tasks(InMemoryCoreState):
    """The SuperLink's store of tasks, without messages."""

    get_node_id = store_message_and_object_tree = None  # type: ignore[assignment]


class Place:
    """A SuperLink's tasks and an executor that starts slow processes."""

    def __init__(self, executor: superexec.OwningExecutor) -> None:
        self.state, self.executor = Tasks(InMemoryObjectStore()), executor
        self.task_id = self.state.create_task(TaskType.SERVER_APP, run_id=1) or 0
        self.beaten = threading.Event()

    def client(self, **_: object) -> SimpleNamespace:
        """The Runtime API, without HTTP."""

        def beat(_: SendTaskHeartbeatRequest) -> None:
            self.state.acknowledge_task_heartbeat(self.task_id)
            self.beaten.set()

        def end(request: PushTaskOutputRequest) -> None:
            self.state.finish_task(self.task_id, request.sub_status, request.details)

        return SimpleNamespace(SendTaskHeartbeat=beat, PushTaskOutput=end, close=lambda: None)

    def launch(self) -> psutil.Process:
        token = self.state.claim_task(self.task_id)
        assert token is not None
        self.executor.launch(ExecutionSpec(**SPEC, token=token, task_id=self.task_id))  # type: ignore[arg-type]
        return psutil.Process().children()[-1]

    @property
    def task(self) -> Task:
        self.state.acknowledge_task_heartbeat(0)  # this call also expires overdue tasks
        return self.state.task_store[self.task_id]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (slow := tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setitem(TASK_TYPE_TO_COMMAND, TaskType.SERVER_APP, str(slow))
    found = Place(superexec.OwningExecutor())
    monkeypatch.setattr(runtime.RuntimeHttpClient, "from_server_address", found.client)
    yield found
    found.executor.close()


def test_a_process_that_starts_slowly_keeps_its_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpatched Flower would start a second process after 30 s."""
    place.launch()
    assert place.beaten.wait(20)
    later = in_memory_corestate.now() + timedelta(seconds=40)
    monkeypatch.setattr(in_memory_corestate, "now", lambda: later)
    assert place.task.status.status == Status.STARTING
    assert place.state.claim_task(place.task_id) is None


def test_a_process_that_dies_fails_its_task_at_once(place: Place) -> None:
    """Unpatched Flower would wait a minute for a heartbeat."""
    place.launch().kill()
    until(lambda: place.task.status.status == Status.FINISHED)
    assert place.task.status.sub_status == SubStatus.FAILED


def test_processes_end_with_their_superexec(place: Place) -> None:
    process = place.launch()
    place.executor.close()
    until(lambda: not process.is_running())


def test_the_superlink_starts_our_superexec(monkeypatch: pytest.MonkeyPatch) -> None:
    flower = superlink.import_module(flower_superlink.__module__)
    command = flower._get_superexec_command
    monkeypatch.setattr(flower, "_get_superexec_command", command)
    superlink._start_own_superexec()
    given = {"runtime_address": "127.0.0.1:1", "parent_pid": 7, "runtime_certificates": None}
    given |= {"runtime_root_certificates_path": None, "runtime_dependency_install": False}
    own = flower._get_superexec_command(**given)
    assert own[1:4] == ["-P", "-m", superexec.__name__] and own[4:] == command(**given)[1:]
    monkeypatch.setattr(run_superexec, "get_executor", run_superexec.get_executor)
    monkeypatch.setattr(superexec, "flower_superexec", lambda: None)
    superexec.main()
    assert isinstance(run_superexec.get_executor(None), superexec.OwningExecutor)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
