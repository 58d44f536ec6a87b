"""A run's folder is copied from the server completely or not at all, and only to its target."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import serving

from collapipe.deployment import run_archive
from collapipe.deployment.run_archive import bring, pack, unpack
from collapipe.deployment.server_folder import CONNECTION, ServerFolder, create
from collapipe.errors import ConfigError, StorageError
from collapipe.flower.commands import free_port

RUN = "18446744073709551615"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ServerFolder]:
    """The folder of a running server that has a run in the folder ``there``."""
    made = create(tmp_path / "f", ["berlin"], "127.0.0.1", free_port(), free_port())
    made.note_run(RUN, a_run(tmp_path / "there"))
    with serving(made):
        yield made


def a_run(folder: Path) -> Path:
    for name in ("metrics.jsonl", "model/model.safetensors", "checkpoints/000002/state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 1000)
    (folder / "empty").touch()
    (folder / ".lock").touch()
    (folder / "checkpoints" / "latest").symlink_to("000002")
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    """The bytes of each file by its path; None for folders and for links to folders."""
    found = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for path, name in found.items()}


def test_a_copied_run_replaces_older_files_and_keeps_other_files(
    folder: ServerFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    (here / "checkpoints" / "000001").mkdir(parents=True)
    (here / "metrics.jsonl").write_text("shorter")
    (here / "report.html").write_text("mine")
    bring(folder.flower_home, CONNECTION, RUN, here)
    assert "brought      4 files" in capsys.readouterr().out
    expected = content(tmp_path / "there") | {"report.html": b"mine"}
    assert content(here) == {name: what for name, what in expected.items() if name != ".lock"}
    assert (here / "checkpoints" / "latest").readlink() == Path("000002")
    assert {path.name for path in tmp_path.iterdir()} == {"f", "there", "here"}


def test_a_folder_on_the_servers_machine_is_not_changed(
    folder: ServerFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(tmp_path / "there")
    bring(folder.flower_home, CONNECTION, RUN, tmp_path / "there")
    assert (capsys.readouterr().out, content(tmp_path / "there")) == ("", before)


@pytest.mark.parametrize("fault", ["cut", "link", "unknown", "gone"])
def test_nothing_is_copied_if_a_part_cannot_be_copied(
    fault: str, folder: ServerFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    there, here, run, name = tmp_path / "there", tmp_path / "here", RUN, CONNECTION
    here.mkdir()
    if fault == "cut":  # while the run is being sent, after its first part
        whole = run_archive._content

        def cut(path: Path, size: int) -> Iterator[bytes]:
            if path.name == "model.safetensors":
                raise StorageError("cut")
            return whole(path, size)

        monkeypatch.setattr(run_archive, "_content", cut)
    elif fault == "link":
        (there / "model" / "elsewhere").symlink_to("/etc/passwd")
    elif fault == "unknown":
        run = "7"
    else:
        name = "another"
    bring(folder.flower_home, name, run, here)
    assert "not brought here" in capsys.readouterr().out
    assert [*here.iterdir()] == []
    assert {path.name for path in tmp_path.iterdir()} == {"f", "there", "here"}


@pytest.mark.parametrize("name", ["../elsewhere", "link/elsewhere"])
def test_an_archive_cannot_write_outside_its_target(name: str, tmp_path: Path) -> None:
    archive, target = io.BytesIO(), tmp_path / "target"
    with tarfile.open(fileobj=archive, mode="w") as members:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "../"
        if name.startswith("link"):
            members.addfile(link)
        members.addfile(tarfile.TarInfo(name))
    archive.seek(0)
    target.mkdir()
    with pytest.raises((tarfile.TarError, ConfigError)):
        unpack(archive, target)
    assert not (tmp_path / "elsewhere").exists()


def test_an_archive_with_too_many_bytes_or_members_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = b"".join(pack(a_run(tmp_path / "there")))
    unpack(io.BytesIO(archive), tmp_path / "whole")
    for limit, value in (("_MOST_BYTES", len(archive) // 2), ("_MOST_MEMBERS", 4)):
        with monkeypatch.context() as patch, pytest.raises(StorageError):
            patch.setattr(run_archive, limit, value)
            unpack(io.BytesIO(archive), tmp_path / limit)
