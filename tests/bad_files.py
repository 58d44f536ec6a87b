"""Invalid files, and checks that a task reports an invalid or missing one."""

import json
import struct
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


def without_elements(*sizes: int) -> bytes:
    """A file of safetensors with a tensor of shape [0, …] that torch cannot make."""
    head = json.dumps({"a": {"dtype": "F32", "shape": [0, *sizes], "data_offsets": [0, 0]}})
    return struct.pack("<Q", len(head)) + head.encode()
