"""Units' replies carry the identity of Flower's task, which its process has."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _task() -> None:
    """As in a unit's process of run 1."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
