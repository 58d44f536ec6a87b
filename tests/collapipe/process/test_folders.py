"""Temporary folders are removed when their process or their object ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from collapipe.process.folders import TemporaryFolder

MAKE = "import time; from collapipe.process.folders import TemporaryFolder\n"
MAKE += "made = TemporaryFolder('trial'); print(made.path, flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_folder_of_a_killed_process_is_removed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders in use, folders of other users or names, and the target of a link are kept."""
    others = [tmp_path / "collapipe-runs", tmp_path / "collapipe-trial-12345678"]
    for each in others:
        each.mkdir()
    (tmp_path / "collapipe-trial-abcdefgh.tmp").symlink_to(others[0])
    command = [sys.executable, "-c", MAKE]
    environment = {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "key").touch()
        with TemporaryFolder("trial") as folder:
            assert left.exists() and folder.stat().st_mode & 0o777 == 0o700
        process.kill()
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        TemporaryFolder("other")
    assert left.exists()
    with TemporaryFolder("other") as folder:
        assert not left.exists() and folder.exists()
    assert not folder.exists()
    assert all(each.exists() for each in others)


def test_a_folder_is_removed_with_its_object() -> None:
    made = TemporaryFolder("trial")
    folder = made.path
    del made
    assert not folder.exists()
