"""Files appear complete and with their mode; new files replace no existing file."""

import os
import re
from pathlib import Path
from stat import S_IMODE

import pytest

from collapipe.errors import ConfigError
from collapipe.process import files


def test_a_new_file_does_not_replace_an_existing_file_or_link(tmp_path: Path) -> None:
    file, link = tmp_path / "key", tmp_path / "link"
    files.write_new(file, b"mine", files.PRIVATE)
    link.symlink_to(tmp_path / "nowhere")
    for taken in (file, link):
        with pytest.raises(ConfigError, match=f"{taken}: cannot be written"):
            files.write_new(taken, b"another")
    assert (file.read_bytes(), S_IMODE(file.stat().st_mode)) == (b"mine", 0o600)
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_an_open_file_keeps_its_content_while_it_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "list"
    files.replace(file, b"old")
    with file.open("rb") as reading:
        files.replace(file, b"new")
        assert reading.read() == b"old"
    assert file.read_bytes() == b"new"


@pytest.mark.parametrize("durable", [False, True])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), files.replacing(file, durable=durable) as partial:
        partial.write_bytes(b"half")
        raise KeyboardInterrupt
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"old", [file])


@pytest.mark.parametrize("new", [False, True])
def test_a_durable_file_is_synced_before_its_rename_and_its_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    file, sync, synced = tmp_path / "weights", os.fsync, list[tuple[bool, bytes | None]]()

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((file.exists(), None if path == tmp_path else path.read_bytes()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with files.replacing(file, new=new) as partial:
        partial.write_bytes(b"whole")
    assert synced == [(False, b"whole"), (True, None)]
    assert list(tmp_path.iterdir()) == [file]


def test_two_writers_can_replace_a_file_at_once_and_it_has_the_requested_mode(
    tmp_path: Path,
) -> None:
    file = tmp_path / "key"
    with files.replacing(file, files.PRIVATE) as one, files.replacing(file, files.PRIVATE) as other:
        one.write_bytes(b"one")
        assert S_IMODE(one.stat().st_mode) == 0o600
        other.write_bytes(b"other")
        one.chmod(0o644)  # like a library that recreates the file; ``one`` is renamed last
    assert (file.read_bytes(), S_IMODE(file.stat().st_mode)) == (b"one", 0o600)


def test_an_unfinished_folder_does_not_appear(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    with pytest.raises(KeyboardInterrupt), files.new_folder(folder) as partial:
        (partial / "key").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with files.new_folder(folder) as partial:
        (partial / "key").touch()
    assert [path.name for path in folder.iterdir()] == ["key"]


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"0" * (2**20 + 1))
    with pytest.raises(ConfigError, match="bring another"):
        files.read(tmp_path / "long", "bring another")


def test_an_error_in_a_new_folder_names_it_by_its_final_name(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    expected = re.escape(f"{folder}/keys/a: cannot be written (No such file or directory)")
    with pytest.raises(ConfigError, match=f"^{expected}"), files.new_folder(folder) as partial:
        files.write_new(partial / "keys" / "a", b"")
    assert [*tmp_path.iterdir()] == []
