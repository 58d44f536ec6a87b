"""What the documentation says of options, files and extensions is so."""

import re
from pathlib import Path

import pytest
from drawn_schedule import render
from federated import run

from collapipe.config import Settings, load_overrides, own_overrides
from collapipe.config.composing import composed, options_of
from pipeline import schedule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
GROUPS = CONFIGURATION.split("\n## ")[1]
ENVIRONMENT = (ROOT / "docs/environment.md").read_text()
OPTIONS = re.findall(
    r"^\| `([\w.]+)` \| `(.+?)` \| (.*?) ?\|$", CONFIGURATION + ENVIRONMENT, re.MULTILINE
)


def test_documented_options_exist_and_have_these_defaults() -> None:
    assert len(OPTIONS) > 60
    by_condition: dict[str, list[str]] = {}
    for name, default, meaning in OPTIONS:
        condition = re.match(r"with `(.+?)`", meaning)
        by_condition.setdefault(condition[1] if condition else "", []).append(f"{name}={default}")
    for chosen, defaults in by_condition.items():
        assert told(load_overrides([*chosen.split(), *defaults])) == told(
            load_overrides(chosen.split())
        )


def test_documented_choices_are_files() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*)$", GROUPS, re.MULTILINE)
    choices = {group: set(re.findall(r"`(\w+)`", cells)) for group, cells in rows}
    folders = [path for path in (ROOT / "conf").iterdir() if path.is_dir()]
    files = {path.name: {file.stem for file in path.glob("*.yaml")} for path in folders}
    assert choices == files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(\s*([^)#\s]+)", text) if "://" not in link]
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    wanted = [*(page.parent / link for link in links), *(ROOT / file for file in files)]
    assert [path for path in wanted if not path.exists()] == []


def test_the_schedules_are_drawn_as_they_are() -> None:
    text = (ROOT / "docs/round.md").read_text()
    for build in schedule.SCHEDULES.values():
        assert f"{build.__name__}\n{render(build(3, 4))}\n" in text


def test_the_examples_of_extensions_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/extend.md").read_text()
    examples = re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for name, source in examples:
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    commands = re.findall(r"^    collapipe run (.*_target_=\w+\.[A-Z].*)$", text, re.MULTILINE)
    options = [option for command in commands for option in command.split()]
    assert len(options) == 6
    weights = run(tmp_path / "run", *options, "model.num_blocks=6")
    assert weights["blocks.5.gate"].mean().item() == pytest.approx(2, abs=0.1)


def test_a_name_of_ones_own_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/extend.md").read_text()
    file, content = re.findall(r"`(conf/\w+/\w+\.yaml)`.*?```yaml\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(content.replace("turns.", "own_turns."))
    (source,) = re.findall(r"`turns\.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "own_turns.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^    collapipe run (strategy=turns .*)$", text, re.MULTILINE)
    strategy = load_overrides(own_overrides(command.split())).build("strategy")
    assert (type(strategy).__module__, strategy.others) == ("own_turns", 1)


def test_the_example_of_a_file_of_options_works(tmp_path: Path) -> None:
    (content,) = re.findall(r"```yaml\n(.*?)```", CONFIGURATION, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(content.replace("sentences.jsonl", "/dev/null"))
    settled = own_overrides(["model=huggingface", "model.family=bert"], tmp_path / "mine.yaml")
    tree = options_of(composed(settled))
    assert tree["task"]["_target_"].endswith("NamedEntities")
    assert (tree["federation"]["rounds"], tree["data"]["train_file"]) == (30, "/dev/null")


def told(settings: Settings) -> tuple[object, str]:
    """All values, and the run's folder without the time in it."""
    return settings.tree, re.sub(r"\d", "#", settings.run_dir)
