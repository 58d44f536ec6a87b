"""Files appear whole, with their mode, and never in the place of another."""

from pathlib import Path
from stat import S_IMODE

import pytest

from collapipe.credentials import files
from collapipe.errors import ConfigError


def test_a_new_file_takes_nobodys_place(tmp_path: Path) -> None:
    file, link = tmp_path / "key", tmp_path / "link"
    files.write_new(file, b"mine", files.PRIVATE)
    link.symlink_to(tmp_path / "nowhere")
    for taken in (file, link):
        with pytest.raises(ConfigError, match=f"{taken}: cannot be written"):
            files.write_new(taken, b"another")
    assert (file.read_bytes(), S_IMODE(file.stat().st_mode)) == (b"mine", 0o600)
    assert sorted(tmp_path.iterdir()) == [file, link]


def test_a_replaced_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "list"
    files.replace(file, b"old")
    with file.open("rb") as reading:
        files.replace(file, b"new")
        assert reading.read() == b"old"
    assert file.read_bytes() == b"new"


def test_a_folder_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "farm"
    with pytest.raises(KeyboardInterrupt), files.new_folder(folder) as partial:
        (partial / "key").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with files.new_folder(folder) as partial:
        (partial / "key").touch()
    assert [path.name for path in folder.iterdir()] == ["key"]


def test_a_long_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"0" * (2**20 + 1))
    with pytest.raises(ConfigError, match="bring another"):
        files.read(tmp_path / "long", "bring another")
