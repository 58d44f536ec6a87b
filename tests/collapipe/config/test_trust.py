"""A run folder from another person must not run code or choose addresses."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import flwr_datasets.partitioner
import pytest

from collapipe.config import load_saved
from collapipe.config.composing import compose
from collapipe.config.trust import check_plugins
from collapipe.errors import ConfigError
from collapipe.tasks import dates


@dataclass(frozen=True)
class Foreign:
    """A class of another package; its constructor could do anything."""


class NoPartitioner:
    """A class in the package of partitioners that is not a partitioner."""


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("collapipe.tasks.dates.Foreign", "task"),  # through a module of CollaPipe
        ("flwr_datasets.partitioner.NoPartitioner", "data.partitioner"),
        ("os.system", "data.partitioner"),
        ("collapipe.config.load_saved", "strategy"),  # not a class
        ("pathlib.Path", "environment"),
    ],
)
def test_classes_that_are_not_known_plug_ins_are_refused(
    monkeypatch: pytest.MonkeyPatch, target: str, option: str
) -> None:
    monkeypatch.setattr(dates, "Foreign", Foreign, raising=False)
    monkeypatch.setattr(NoPartitioner, "__module__", "flwr_datasets.partitioner.mine")
    monkeypatch.setattr(flwr_datasets.partitioner, "NoPartitioner", NoPartitioner, raising=False)
    with pytest.raises(ConfigError, match=rf"^{option}\._target_={target}: "):
        check_plugins(compose([f"{option}._target_={target}"]).tree)


def test_a_text_in_place_of_the_list_of_trusted_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trusted='mine': must be a list of texts: \['mine'\]$"):
        load_saved(tmp_path / "config.yaml", "mine")


@pytest.mark.parametrize(
    "option", ["cluster", "channel", "environment", "strategy", "data.partitioner"]
)
def test_reading_a_saved_run_does_not_import_plug_ins_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """A module in the current folder could do anything when it is imported."""
    (tmp_path / "mine.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    options = compose([])
    tree = json.loads(options.text)["tree"]
    *sections, name = option.split(".")
    node = tree
    for each in sections:
        node = node[each]
    node[name] = {"_target_": "mine.Mine"}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    settings = load_saved(tmp_path / "config.yaml")
    assert settings.model.num_blocks and settings.task.name == "dates"
    assert not (tmp_path / "ran").exists() and "mine" not in sys.modules


@pytest.mark.parametrize(
    "override",
    [
        "+own={a: [{b: [{_target_: os.system}]}]}",
        "cluster=edge cluster.kinds=[{_target_: os.system}]",
        "+data.partitioner.inner={_target_: os.system}",
    ],
)
def test_a_plug_in_nested_in_lists_is_found(override: str) -> None:
    with pytest.raises(ConfigError, match=r"_target_=os\.system: "):
        many = override.split(" ", 1) if override.startswith("cluster") else [override]
        check_plugins(compose(many).tree)
