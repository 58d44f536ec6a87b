"""``collapipe deploy check`` trains one step with an owner's file, without a server."""

import json
import shlex
from pathlib import Path

import pytest
from device_cluster import daemons
from test_devices import inventory

from client_app import dry_run
from collapipe.cli.deploy.owner_check import check_owner
from collapipe.deployment.checking import Finding
from collapipe.errors import StageError
from collapipe.owner_file import read_owner
from collapipe.report import ClusterReport


def owned(folder: Path, more: str = "") -> list[Finding]:
    """The findings of a check of an owner's rows and devices."""
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"a": 1, "b": "ünï"}) for _ in "rows"))
    file = folder / "unit.yaml"
    file.write_text(f"data: {{train_file: train.jsonl}}\n{more}")
    return [*check_owner(file, read_owner(file))]


def test_a_step_is_trained_on_the_devices(tmp_path: Path) -> None:
    with daemons(2) as running:
        inventory(tmp_path / "boxes.yaml", running)
        *_, last = owned(tmp_path, "cluster: {file: boxes.yaml}\n")
    assert (last.what, last.error) == ("dry run", None)
    assert "on device-0, device-1: loss " in last.found


@pytest.mark.thorough
def test_a_step_is_trained_without_devices(tmp_path: Path) -> None:
    *_, last = owned(tmp_path, "pipeline: {threads: 1}\n")
    assert (last.what, last.error) == ("dry run", None)


def test_a_device_that_fails_in_the_step_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device answers, but its memory is too small for a block."""
    with daemons(2) as running:
        small = running[1]
        monkeypatch.setattr(small, "_most", 1000)
        inventory(tmp_path / "boxes.yaml", running)
        found = owned(tmp_path, "cluster: {file: boxes.yaml}\n")
    *before, last = found
    assert all(each.error is None for each in before)
    assert last.what == "dry run" and "device-1" in str(last.error) and last.way_out


@pytest.mark.parametrize(
    ("more", "trains"),
    [("", True), ("cluster: {file: nothing.yaml}\n", False)],
    ids=["nothing is wrong", "something is wrong"],
)
def test_no_step_is_trained_if_an_earlier_check_found_a_problem(
    more: str, trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[object]()

    def train(*given: object) -> ClusterReport:
        called.append(given)
        raise StageError("box", "is gone; start it")

    monkeypatch.setattr(dry_run, "train_one_step", train)
    *_, last = owned(tmp_path, more)
    assert bool(called) is trains
    if trains:
        assert last == Finding("dry run", error="box: is gone", way_out="start it")


def test_a_silent_device_names_a_command_that_a_shell_understands(tmp_path: Path) -> None:
    with daemons(1) as running:
        inventory(file := tmp_path / "my boxes.yaml", running)
    found = owned(tmp_path, "cluster: {file: my boxes.yaml}\n")
    (way_out,) = (each.way_out for each in found if each.what == "device device-0")
    assert shlex.split(way_out) == ["collapipe", "device", "check", str(file)]


def test_an_error_of_torch_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> ClusterReport:
        raise RuntimeError("out of memory\nTried to allocate 2 GiB")

    monkeypatch.setattr(dry_run, "train_one_step", train)
    *_, last = owned(tmp_path)
    assert "out of memory" in str(last.error) and "\n" not in str(last.error) and last.way_out
