"""Checks that a task reports an invalid or missing file."""

from pathlib import Path

import pytest

from collapipe.errors import DataError
from collapipe.tasks.task import Task


def assert_named(task: Task, file: Path, content: bytes | None, words: list[str]) -> None:
    """Write ``content`` to ``file`` (None deletes it), and check that reading the task's rows
    raises a one-line ``DataError`` that contains ``words``."""
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        rows = task.splits(0)
        _ = rows.train, rows.validation, rows.test
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
