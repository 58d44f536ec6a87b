"""Frozen tensors come back as they were, or not at all."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from collapipe.errors import ConfigError, DataError, WireError
from collapipe.process.folders import in_home
from collapipe.wire.frozen_store import FrozenStore, default_folder, digest

BUFFER = torch.arange(12.0)


def tensors() -> dict[str, Tensor]:
    """Of several types, one transposed, one without numbers, two in one storage."""
    return {
        "b": BUFFER[:6].view(2, 3).t(),
        "a": BUFFER[6:],
        "half": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Names, types and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def test_what_is_added_is_loaded(tmp_path: Path) -> None:
    """Also by another process, and with the order of names as it comes."""
    folder = tmp_path / "is" / "made"
    name = FrozenStore(folder).add(tensors())
    again = FrozenStore(folder)
    assert again.lacks([name, "0" * 64]) == ["0" * 64]
    assert same(again.load(name), tensors())
    assert again.add(dict(reversed(tensors().items()))) == name
    assert [path.name for path in folder.iterdir()] == [f"{name}.safetensors"]


def test_a_full_store_forgets_what_was_not_used_for_longest(tmp_path: Path) -> None:
    limit = 1000  # bytes, of which each of these takes more than 400
    store, groups = FrozenStore(tmp_path, limit), [{"w": torch.full((100,), k)} for k in range(3)]
    first, second = (store.add({"w": each["w"].float()}) for each in groups[:2])
    for age, name in ((20, second), (30, first)):
        os.utime(tmp_path / f"{name}.safetensors", (age, age))
    store.load(first)  # used now
    third = store.add({"w": groups[2]["w"].float()})
    assert store.lacks([first, second, third]) == [second]


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
def test_whatever_differs_has_another_digest(other: dict[str, Tensor]) -> None:
    assert digest(other) != digest(tensors())


def test_a_digest_is_the_same_everywhere() -> None:
    """Machines compare it: it must not change between versions."""
    assert digest({"w": torch.tensor([1.0, 2.0])}) == (
        "6dbfbed9dee3dbde593832616eda8879e9f9a924278893c8acb2ea5be161194a"
    )


def test_a_damaged_file_is_removed_and_lacking(tmp_path: Path) -> None:
    """Cut short, or with other content under the name: never handed out."""
    store = FrozenStore(tmp_path)
    name = store.add(tensors())
    file = tmp_path / f"{name}.safetensors"
    whole = file.read_bytes()
    changed = tensors() | {"a": tensors()["a"] + 1}
    for damage in ("short", "empty", "other"):
        if damage == "other":
            save_file({key: tensor.contiguous() for key, tensor in changed.items()}, file)
        else:
            file.write_bytes(whole[:-1] if damage == "short" else b"")
        with pytest.raises(DataError, match=f"{name}.*damaged") as caught:
            store.load(name)
        assert "\n" not in str(caught.value)
        assert store.lacks([name]) == [name]
        assert store.add(tensors()) == name
        assert file.read_bytes() == whole
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        store.load(name)


@pytest.mark.parametrize(
    "name", ["", "../x", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "/" + "0" * 63, "é" * 64]
)
def test_no_path_comes_of_a_name(tmp_path: Path, name: str) -> None:
    store = FrozenStore(tmp_path / "store")
    with pytest.raises(WireError, match="64 hex digits"):
        store.load(name)
    with pytest.raises(WireError, match="64 hex digits"):
        store.lacks(["0" * 64, name])


def test_many_add_the_same_at_once(tmp_path: Path) -> None:
    """Whoever looks finds nothing or all of it, and nothing is left over."""
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


def test_what_does_not_reach_the_disk_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that writes something else, and a folder that is none."""
    store, name = FrozenStore(tmp_path), digest(tensors())

    def wrong(kept: dict[str, Tensor], path: Path) -> None:
        save_file({key: tensor + 1 for key, tensor in kept.items()}, path)

    with monkeypatch.context() as patch:
        patch.setattr("collapipe.wire.frozen_store.save_file", wrong)
        with pytest.raises(ConfigError, match="reads differently"):
            store.add(tensors())
    assert store.lacks([name]) == [name]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep frozen weights") as caught:
        FrozenStore(tmp_path / "file").add(tensors())
    assert "\n" not in str(caught.value)


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the user's cache; a relative ``XDG_CACHE_HOME`` counts for none."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, root in [(str(tmp_path), tmp_path), ("", None), ("relative", None)]:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        expected = (root or tmp_path / "home" / ".cache") / "collapipe" / "frozen"
        assert in_home(str(default_folder())) == str(expected)


def test_what_was_loaded_does_not_change_with_its_file(tmp_path: Path) -> None:
    """Whoever writes into the file after the check changes the file alone."""
    store = FrozenStore(tmp_path)
    name = store.add(tensors())
    loaded = store.load(name)
    file = tmp_path / f"{name}.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert same(loaded, tensors())


def test_what_cannot_be_read_is_not_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that answers not now, and a folder of that name."""
    store, folder = FrozenStore(tmp_path), tmp_path / f"{'0' * 64}.safetensors"
    name = store.add(tensors())

    def broken(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        with pytest.raises(DataError, match="cannot read frozen weights"):
            store.load(name)
    assert same(store.load(name), tensors())
    folder.mkdir()
    with pytest.raises(DataError, match="cannot read frozen weights"):
        store.load("0" * 64)
    assert folder.is_dir()


def test_a_damaged_file_that_cannot_be_removed_is_not_handed_out(
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


def test_the_folder_is_its_users_alone(tmp_path: Path) -> None:
    FrozenStore(tmp_path / "store").add(tensors())
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
