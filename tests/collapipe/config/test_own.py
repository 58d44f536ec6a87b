"""A user's options file and ``./conf`` become overrides that need only CollaPipe's own files."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from collapipe.config import load_overrides, own_overrides
from collapipe.config.composing import composed, options_of
from collapipe.errors import ConfigError

TURNS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Turns:
    others: int
    most: int
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a user's strategy and experiment."""
    monkeypatch.chdir(tmp_path)
    for group in ("strategy", "experiment"):
        (tmp_path / "conf" / group).mkdir(parents=True)
    module = f"turns{abs(hash(tmp_path))}"  # unique: a test must not import another test's module
    (tmp_path / f"{module}.py").write_text(TURNS)
    (tmp_path / "conf/strategy/turns.yaml").write_text(
        f"_target_: {module}.Turns\nothers: 2\nmost: ${{channel.num_channels}}\n"
    )
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /strategy: turns\n  - override /optimizer: sgd\n"
        "federation:\n  rounds: 7\n"
    )
    return tmp_path


def test_groups_in_the_current_folder_are_found_and_options_override_them(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = own_overrides(["strategy=turns", "strategy.others=3", "channel.num_channels=2"])
    strategy = load_overrides(settled).build("strategy")
    assert (strategy.others, strategy.most) == (3, 2)
    mine = load_overrides(own_overrides(["experiment=mine"]))
    assert (mine.federation.rounds, mine.optimizer.name) == (7, "sgd")
    monkeypatch.chdir(own / "conf")  # the overrides do not need the user's folder
    assert options_of(composed(settled))["strategy"]["most"] == 2
    with pytest.raises(ConfigError, match=r"^strategy=turns: there is no "):
        load_overrides(["strategy=turns"])
    monkeypatch.chdir(own)
    with pytest.raises(ConfigError, match=r"; nearest: turns; known: .*, turns$"):
        own_overrides(["strategy=turnd"])


def test_an_own_file_may_lack_options_that_are_null_in_the_built_in_one(own: Path) -> None:
    (own / "conf/channel").mkdir()
    (own / "conf/channel/mine.yaml").write_text("_target_: radio.Mine\nnum_channels: 2\n")
    settled = own_overrides(["channel=mine", "strategy=even"])
    assert "~channel.model_bits" in settled  # null in channel=edge
    channel = {"_target_": "radio.Mine", "num_channels": 2}
    assert options_of(composed(settled))["channel"] == channel


def test_overrides_do_not_change_without_a_users_files() -> None:
    given = ["seed=3", "strategy=random", "tracking.mlflow='${oc.env:HOME}'"]
    assert own_overrides(given) == given


def test_each_reference_is_followed_by_its_resolved_value() -> None:
    settled = own_overrides(["strategy=turns"])
    referring = [each for each in settled if "${" in each]
    later = [each.partition("=")[0].lstrip("+") for each in settled[settled.index(referring[-1]) :]]
    assert [each.partition("=")[0].lstrip("+") in later[1:] for each in referring] == [True]


def test_a_syntax_error_in_a_users_group_file_names_file_and_line(own: Path) -> None:
    (own / "conf/strategy/typo.yaml").write_text("_target_: turns.Turns\n others: [1\n")
    with pytest.raises(ConfigError, match=r'mapping values are not allowed.*typo\.yaml", line 2'):
        load_overrides(own_overrides(["strategy=typo"]))


@pytest.mark.parametrize(
    "began",
    [
        [],
        ["experiment=mine", "strategy.others=5"],
        pytest.param(
            [
                "adapter=lora",
                "cluster=edge",
                "strategy=all",
                "partitioner=dirichlet",
                "data=synthetic",
            ],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [
                "task=ner",
                "model=huggingface",
                "model.family=bert",
                "model.config={hidden_size: 24}",
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=" ".join,
)
def test_the_saved_configuration_of_a_run_gives_the_same_options(
    own: Path, began: list[str]
) -> None:
    tree = options_of(composed(own_overrides(began)))
    file = own / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
    assert options_of(composed(own_overrides([], file))) == tree
    again = options_of(composed(own_overrides(["seed=8", "federation.rounds=1"], file)))
    assert (again["seed"], again["federation"]["rounds"]) == (8, 1)


def test_a_file_chooses_groups_and_sets_options(own: Path) -> None:
    file = own / "mine.yaml"
    file.write_text("task: ner\nmodel: {dim: 32}\nexperiment: [fig09]\nfederation: {rounds: 3}\n")
    tree = options_of(composed(own_overrides(["federation.rounds=4"], file)))
    assert (tree["task"]["_target_"], tree["model"]["dim"]) == (
        "collapipe.tasks.ner.NamedEntities",
        32,
    )
    assert (tree["federation"]["rounds"], tree["federation"]["local_steps"]) == (4, 10)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("federation: {round: 3}", "unknown option federation.round; nearest: federation.rounds"),
        ("task: nosuch", "task=nosuch"),
        ("[1]", "must be options"),
        ("a: [", "cannot be read"),
        ("federation: 3", "federation: must be options"),
        ("w" * 999, "ww …; known: adapter"),
        ("hydra: {searchpath: [pkg://os]}", "hydra: must be options"),
    ],
)
def test_an_invalid_options_file_is_a_one_line_error(own: Path, content: str, names: str) -> None:
    file = own / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(names)) as caught:
        own_overrides([], file)
    assert "\n" not in str(caught.value)


def test_a_plug_in_must_be_a_dataclass() -> None:
    """Constructors of other classes could do anything with their options."""
    target = "strategy._target_=subprocess.Popen"
    with pytest.raises(ConfigError, match=rf"^{re.escape(target)}: must be a dataclass$"):
        load_overrides(["strategy=even", target, "+strategy.args=[touch,planted]"])
    assert not Path("planted").exists()
