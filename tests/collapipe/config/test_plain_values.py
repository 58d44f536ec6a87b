"""Typed values that Hydra's grammar refuses are read as plain texts."""

import functools
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from collapipe.cli import up
from collapipe.config import own_overrides
from collapipe.config.composing import composed, options_of
from collapipe.config.overrides import expand, merged, parse
from collapipe.errors import ConfigError

_TYPED = [
    "bücher.csv",
    "数据",
    "(1)",
    "Umfrage (1).csv",
    "it's",
    "~/x",
    "Review Text (EN)",
    "a=b&c;d#e",
    "می‌خواهم",
]


def _text_column(overrides: list[str]) -> object:
    return options_of(composed(overrides))["data"]["text_column"]


@functools.cache
def _of_hydra() -> list[object]:
    """The values as Hydra composes them: it adds an option for each."""
    added = [f"+optimizer.own{number}={value}" for number, value in enumerate(_TYPED)]
    options = options_of(composed(added))["optimizer"]
    return [options[f"own{number}"] for number in range(len(_TYPED))]


@pytest.mark.parametrize("value", _TYPED)
def test_a_plain_value_is_read_as_text(value: str) -> None:
    typed = f"data.text_column={value}"
    assert _text_column([typed]) == value
    (settled,) = merged([typed], [])
    assert parse([settled])[0].value() == value
    assert _of_hydra()[_TYPED.index(value)] == value


def test_a_reference_next_to_a_non_ascii_letter_is_resolved() -> None:
    assert _text_column(["data.text_column=ü${seed}", "seed=7"]) == "ü7"


def test_a_sweep_accepts_plain_values() -> None:
    assert [job for (job,) in expand(["data.train_file=bücher.csv,b.csv"])] == [
        "data.train_file='bücher.csv'",
        "data.train_file=b.csv",
    ]


@pytest.mark.parametrize("value", ["[ü", "{a: ü}", "'a", "Text (a, b)", "it's, so"])
def test_the_error_for_an_ambiguous_value_shows_it_in_quotes(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([f"data.text_column={value}"])
    shown = shlex.split(str(caught.value).rpartition("; put texts in quotes: ")[2])
    assert [each.value() for each in parse(shown)] == [value]


@pytest.mark.parametrize("bad", ["nonsense", "fü=1", "~/x=1", "=ü"])
def test_an_override_without_a_valid_option_name_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"not an override KEY=VALUE|unknown option|has no name"):
        composed([bad])


def test_up_passes_on_an_inventory_path_with_special_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "jürgen, it's [1].yaml"
    given: list[str] = []
    monkeypatch.setattr(up, "started", lambda *_: nullcontext({}))
    monkeypatch.setattr(up, "_devices", lambda *_: [])
    monkeypatch.setattr(up, "run_command", lambda arguments: given.extend(arguments) or 0)
    up.up(1, 1, file, "1GB", ["run", "seed=1"], [])
    values = {each.key_or_group: each.value() for each in parse(given[1:])}
    assert values["cluster.file"] == str(file)


def test_a_choice_in_an_options_file_may_have_non_ascii_letters(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("experiment: [bücher]\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="experiment=bücher: there is no conf"):
        own_overrides([], file)
