"""Paths may begin with ``~/``; a user without a home folder can use all other paths."""

from pathlib import Path

import pytest
import torch

from collapipe.cli import up
from collapipe.config.composing import compose, composed, run_dir, sweep_dir
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import read_inventory
from collapipe.owner_file import read_owner
from collapipe.process.folders import in_home, with_home
from collapipe.wire.frozen_store import FrozenStore, default_folder

_OPTIONS = [
    "data.root",
    "data.train_file",
    "data.test_file",
    "data.tokenizer",
    "cluster.file",
    "runtime.federation",
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No home folder exists, as in a container whose user is only a number."""

    def none(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", none)
    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME")


@pytest.mark.parametrize("option", _OPTIONS)
def test_options_with_a_path_expand_the_home_folder(home: Path, option: str) -> None:
    group = {"cluster": "cluster=file", "runtime": "runtime=deployment"}.get(
        option.partition(".")[0], "seed=1"
    )
    options = compose([group, f"{option}=~/x"]).tree
    section, _, name = option.partition(".")
    assert options[section][name] == str(home / "x")
    assert option != "data.root" or options["task"].get("root", str(home / "x")) == str(home / "x")


def test_folders_of_runs_expand_the_home_folder(home: Path) -> None:
    assert run_dir(composed(["hydra.run.dir=~/x"])) == str(home / "x")
    assert sweep_dir(["hydra.sweep.dir=~/x"]) == str(home / "x")


def test_paths_in_an_owners_file_expand_the_home_folder(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "unit.yaml"
    rows = "data: {train_file: ~/rows.csv}"
    file.write_text(f"credentials: ~/keys\n{rows}\ncluster: {{file: ~/c.yaml}}\n")
    owner = read_owner(file)
    assert owner.data.train_file == str(home / "rows.csv")
    assert owner.credentials == str(home / "keys")
    assert owner.cluster is not None and owner.cluster.file == str(home / "c.yaml")


def test_credentials_of_an_inventory_expand_the_home_folder(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "boxes.yaml"
    speeds = {"flops_per_s": 1e9, "d2d_rate_bps": 1e9}
    device = {"name": "a", "address": "127.0.0.1:7700", "memory_bytes": 1e9, **speeds}
    file.write_text(up._inventory([[device]], Path("~/keys")))
    assert read_inventory(file, ANY_COST).section.credentials == str(home / "keys")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["device", "--credentials=~/x"], ["device", "--credentials={home}/x"]),
        (["predict", "r", "~/x is a path"], ["predict", "r", "~/x is a path"]),
        (["up", "--", "run", "--config=~/x"], ["up", "--", "run", "--config=~/x"]),
    ],
)
def test_options_of_the_command_line_expand_the_home_folder(
    home: Path, given: list[str], kept: list[str]
) -> None:
    """The shell does not expand ``~`` in ``--option=~/x``."""
    assert with_home(given) == [each.format(home=home) for each in kept]


@pytest.mark.usefixtures("homeless")
def test_a_missing_home_folder_is_an_error_only_if_it_is_needed(tmp_path: Path) -> None:
    FrozenStore(default_folder())
    assert in_home("rows.csv") == "rows.csv"
    with pytest.raises(ConfigError, match="no home folder"):
        FrozenStore(default_folder()).add({"weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="~/x: this user has no home folder"):
        compose(["data.train_file=~/x", "seed=17"])
    file = tmp_path / "unit.yaml"
    file.write_text("credentials: ~/keys\ndata: {train_file: rows.csv}\n")
    with pytest.raises(ConfigError, match=r"unit\.yaml:1: .*no home folder"):
        read_owner(file)
