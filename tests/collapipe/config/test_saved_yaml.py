"""A saved configuration may come from another person: its size, depth and values are limited."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from collapipe.config import load_overrides, load_saved
from collapipe.config.resolved import check_values
from collapipe.config.trust import check_text, read_limited
from collapipe.errors import ConfigError

OWN = OmegaConf.to_yaml(OmegaConf.create(dict(load_overrides([]).tree)))


def test_the_configuration_that_a_run_saves_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(OWN)
    assert read_limited(file) == OWN
    check_text(file, OWN)
    check_values(str(file), load_overrides([]).tree)
    assert load_saved(file).batch_size == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 50_000, "nested too deeply"),
        ("- " * 40_000, "nested too deeply"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(90)), "nested too deeply"),
        (OWN + "own: " + "[" * 60 + "]" * 60, "nested too deeply"),
        (OWN + "#" * 100_000, "more than 100,000 characters"),
        (OWN.replace("seed: 0", "seed: 0x" + "f" * 5000), "is a number out of range"),
        (OWN.replace("lr: 0.003", "lr: 0x" + "f" * 5000), "is a number out of range"),
        (OWN.replace("seed: 0", "seed: " + "9" * 5000), "not a saved configuration"),
        (OWN.replace("seed: 0", "seed: 0x_"), "not a saved configuration"),
        (OWN.replace("seed: 0", "seed: !!int ''"), "has tags"),
        (OWN.replace("seed: 0", "seed: &a 0\nown: *a"), "has references"),
        (OWN.replace("seed: 0", "seed: 0\nseed: 1"), "duplicate key seed"),
        (OWN.replace("  relay: false\n", ""), r"pipeline\.relay: is missing; set it"),
        ("", r"not a saved configuration \(task\._target_ is missing\)"),
        (OWN.replace("  max_length: 32\n", ""), "task.max_length: is missing; set it"),
        ("# CollaPipe 9.8\n" + OWN.replace("link:", "link:\n  odd: 1"), "of CollaPipe 9.8: "),
        (OWN.replace("evaluation:\n  where: auto\n", ""), "evaluation=null: must be a section"),
    ],
)
def test_configurations_that_no_run_saves_are_one_line_errors(
    tmp_path: Path, content: str, message: str
) -> None:
    assert content != OWN
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_saved(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \("):
        read_limited(tmp_path / "nothing")
