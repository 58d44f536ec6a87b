"""The store returns frozen tensors unchanged or raises an error."""

import os
import threading
from pathlib import Path

import pytest
import torch
from bad_files import without_elements
from safetensors.torch import save_file
from torch import Tensor

from collapipe.errors import ConfigError, DataError, WireError
from collapipe.process.folders import in_home
from collapipe.wire import frozen_store
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest, digest_once
from collapipe.wire.parts import pieces
from tests.full_disk import full_disk

BUFFER = torch.arange(12.0)


def tensors() -> dict[str, Tensor]:
    """Tensors of several types: one is transposed, one is empty, and two share a storage."""
    return {
        "b": BUFFER[:6].view(2, 3).t(),
        "a": BUFFER[6:],
        "half": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether names, types and values are equal."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def lacking(store: FrozenStore, *names: str) -> list[str]:
    """The names without a valid file."""
    found = []
    for name in names:
        try:
            store.load(name)
        except DataError:
            found.append(name)
    return found


def test_added_tensors_can_be_loaded(tmp_path: Path) -> None:
    """Another store of the folder loads the tensors; the order of names does not matter."""
    folder = tmp_path / "is" / "made"
    name = FrozenStore(folder).add(tensors())
    again = FrozenStore(folder)
    assert lacking(again, name, "0" * 64) == ["0" * 64]
    assert same(again.load(name), tensors())
    assert again.add(dict(reversed(tensors().items()))) == name
    assert [path.name for path in folder.iterdir()] == [f"{name}.safetensors"]


def test_a_full_store_removes_the_least_recently_used_file(tmp_path: Path) -> None:
    limit = 1000  # bytes; each file takes more than 400
    store, groups = FrozenStore(tmp_path, limit), [{"w": torch.full((100,), k)} for k in range(3)]
    first, second = (store.add({"w": each["w"].float()}) for each in groups[:2])
    for age, name in ((20, second), (30, first)):
        os.utime(tmp_path / f"{name}.safetensors", (age, age))
    store.load(first)  # the most recent use
    third = store.add({"w": groups[2]["w"].float()})
    assert lacking(store, first, second, third) == [second]


def test_a_file_that_another_process_removes_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "removed")
    store = FrozenStore(tmp_path, 10)
    assert not lacking(store, store.add(tensors()))


@pytest.mark.parametrize(
    "other",
    [
        tensors() | {"a": tensors()["a"] + 1},
        tensors() | {"a": tensors()["a"].view(2, 3)},
        tensors() | {"half": tensors()["half"].view(torch.float16)},
        tensors() | {"empty": torch.zeros(4, 0)},
        {name + "x": tensor for name, tensor in tensors().items()},
        {name: tensor for name, tensor in tensors().items() if name != "empty"},
        {},
    ],
)
def test_different_tensors_have_different_digests(other: dict[str, Tensor]) -> None:
    assert digest(other) != digest(tensors())


def test_a_digest_is_the_same_everywhere() -> None:
    """Machines compare digests, so a digest must not change between versions."""
    assert digest({"w": torch.tensor([1.0, 2.0])}) == (
        "6dbfbed9dee3dbde593832616eda8879e9f9a924278893c8acb2ea5be161194a"
    )


def test_a_damaged_file_is_removed_and_reported(tmp_path: Path) -> None:
    """The store never returns a file that is cut short or has other content."""
    store = FrozenStore(tmp_path)
    name = store.add(tensors())
    file = tmp_path / f"{name}.safetensors"
    whole = file.read_bytes()
    changed = tensors() | {"a": tensors()["a"] + 1}
    for damage in ("short", "empty", "shape", "other"):
        if damage == "other":
            save_file({key: tensor.contiguous() for key, tensor in changed.items()}, file)
            os.utime(file, (7, 7))  # clocks of file systems may be coarse
        else:
            found = {"short": whole[:-1], "empty": b"", "shape": without_elements(2**63)}
            file.write_bytes(found[damage])
        with pytest.raises(DataError, match=f"{name}.*damaged") as caught:
            store.load(name)
        assert "\n" not in str(caught.value)
        assert lacking(store, name) == [name]
        assert store.add(tensors()) == name
        assert file.read_bytes() == whole
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        store.load(name)


def test_a_damaged_file_outside_of_a_cache_is_kept(tmp_path: Path) -> None:
    store = FrozenStore(tmp_path, is_cache=False)
    file = tmp_path / f"{store.add(tensors())}.safetensors"
    file.write_bytes(damaged := file.read_bytes()[:-1])
    with pytest.raises(DataError, match="restore the file"):
        store.load(file.stem)
    assert file.read_bytes() == damaged


@pytest.mark.parametrize(
    "name", ["", "../x", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "/" + "0" * 63, "é" * 64]
)
def test_a_name_that_is_not_a_digest_is_refused(tmp_path: Path, name: str) -> None:
    store = FrozenStore(tmp_path / "store")
    with pytest.raises(WireError, match="64 hex digits"):
        store.load(name)


def test_several_threads_can_add_the_same_tensors_at_once(tmp_path: Path) -> None:
    """Every thread loads complete tensors, and no temporary file remains."""
    name, failures = digest(tensors()), []

    def add() -> None:
        try:
            store = FrozenStore(tmp_path)
            assert store.add(tensors()) == name
            assert same(store.load(name), tensors())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.safetensors"]


def test_tensors_that_the_disk_did_not_store_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stores other values, or the store's folder is a file or cannot be looked up."""
    store, name = FrozenStore(tmp_path), digest(tensors())

    def wrong(kept: dict[str, Tensor], alignment: int) -> list[bytes | memoryview]:
        return pieces({key: tensor + 1 for key, tensor in kept.items()}, alignment)

    with monkeypatch.context() as patch:
        patch.setattr(frozen_store, "pieces", wrong)
        with pytest.raises(ConfigError, match="reads differently"):
            store.add(tensors())
    assert lacking(store, name) == [name]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder in ("file", "x" * 300):
        with pytest.raises(ConfigError, match="cannot keep frozen weights") as caught:
            FrozenStore(tmp_path / folder).add(tensors())
        assert "\n" not in str(caught.value)


def test_the_default_folder_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative ``XDG_CACHE_HOME`` is ignored."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, root in [(str(tmp_path), tmp_path), ("", None), ("relative", None)]:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        expected = (root or tmp_path / "home" / ".cache") / "collapipe" / "frozen"
        assert in_home(str(default_folder())) == str(expected)


def test_loaded_tensors_are_memory_mapped_and_aligned(tmp_path: Path) -> None:
    """Loaded tensors take no extra memory, and alignment keeps products bit-identical."""
    store, unaligned = FrozenStore(tmp_path), {"a": torch.ones(3), "b": torch.ones(512)}
    name = store.add(unaligned)
    loaded = store.load(name)
    assert same(loaded, unaligned)
    assert loaded["b"].data_ptr() % 64 == 0
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if name in line]
    assert any(int(first, 16) <= loaded["b"].data_ptr() < int(end, 16) for first, end in spans)


def test_a_device_that_runs_for_months_remembers_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_store, "_known", {})
    monkeypatch.setattr(frozen_store, "_MOST_KNOWN", 2, raising=False)
    for state in range(9):
        assert digest_once(tensors(), state) == digest(tensors())
        assert len(frozen_store._known) <= 2


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process hashes a file again only after a change."""
    store, hashed = FrozenStore(tmp_path), list[object]()
    name = store.add(tensors())
    monkeypatch.setattr(frozen_store, "digest", lambda each: hashed.append(each) or digest(each))
    monkeypatch.setattr(frozen_store, "_known", {})
    for _ in range(3):
        assert lacking(FrozenStore(tmp_path), name) == []
        store.load(name)
    assert len(hashed) == 1
    file = tmp_path / f"{name}.safetensors"
    os.utime(file, (5, 5))
    store.load(name)
    assert len(hashed) == 2
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="damaged"):
        store.load(name)


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    store, name = FrozenStore(tmp_path), digest(tensors())
    with full_disk(), pytest.raises(ConfigError, match="make room") as caught:
        store.add(tensors())
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [] and lacking(store, name) == [name]
    assert store.add(tensors()) == name
    assert same(store.load(name), tensors())


def test_a_file_that_cannot_be_read_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for a moment, or a folder has the file's name."""
    store, folder = FrozenStore(tmp_path), tmp_path / f"{'0' * 64}.safetensors"
    name = store.add(tensors())

    def broken(path: Path) -> dict[str, Tensor]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(frozen_store, "load_file", broken)
        with pytest.raises(DataError, match="cannot read frozen weights"):
            store.load(name)
    assert same(store.load(name), tensors())
    folder.mkdir()
    with pytest.raises(DataError, match="cannot read frozen weights"):
        store.load("0" * 64)
    assert folder.is_dir()


def test_a_damaged_file_that_cannot_be_removed_is_not_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FrozenStore(tmp_path)
    name = store.add(tensors())
    (tmp_path / f"{name}.safetensors").write_bytes(b"")

    def kept(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", kept)
    with pytest.raises(DataError, match="damaged"):
        store.load(name)


def test_only_the_user_can_access_the_folder(tmp_path: Path) -> None:
    FrozenStore(tmp_path / "store").add(tensors())
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
