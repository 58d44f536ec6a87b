"""Units' replies contain the task's identity, which Flower keeps per process."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _task() -> None:
    """Set the identity as in a unit's process of run 1."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
