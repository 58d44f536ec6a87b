"""Options, files and extensions in the documentation exist and work."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from drawn_schedule import render
from federated import run

from collapipe.config import load_overrides, own_overrides
from collapipe.config.composing import composed, options_of
from collapipe.report import RoundReport
from pipeline import schedule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS_PAGE = ROOT / "docs/reference/options.md"
_KEY = re.compile(r"`(\w+)`")
_NAMED = re.compile(r"`((?:\w+\.)+\w+)(?:=[^`]*)?`")


def options_of_files() -> set[str]:
    """Return the names of all options, including groups that a run need not choose."""
    names = set[str]()
    for file in (ROOT / "conf").rglob("*.yaml"):
        text, group = file.read_text(), file.parent.name
        package = re.match(r"# @package (\S+)", text)
        place = package[1] if package else "" if group == "conf" else group
        names |= {*leaves(yaml.safe_load(text), place.replace("_global_", ""))}
    return names


def leaves(tree: object, name: str) -> Iterator[str]:
    """Yield the dotted name of each node of a configuration file."""
    yield name
    for key, below in tree.items() if isinstance(tree, dict) else ():
        yield from leaves(below, f"{name}.{key}".strip("."))


def test_options_that_pages_name_exist() -> None:
    known = options_of_files() | {"hydra.searchpath"}
    groups = {name.partition(".")[0] for name in known}
    found = {
        (page.name, name)
        for page in PAGES
        if page.name not in ("CHANGELOG.md", "inventory.md")  # names that are not options
        for name in _NAMED.findall(page.read_text())
        if name.partition(".")[0] in groups
        and not name.endswith((".py", ".json", ".yaml", ".safetensors"))
    }
    assert len(found) > 60
    assert sorted(each for each in found if each[1] not in known) == []


def test_the_metrics_page_lists_the_keys_of_a_round() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text().partition("## Keys")[2]
    keys = {
        key
        for cell in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
        for key in _KEY.findall(cell)
    }
    assert keys == {field.name for field in fields(RoundReport)} - {"traces"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_relative_links_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(\s*([^)#\s]+)", text) if "://" not in link]
    files = re.findall(r"`(\w+/[\w/]+\.py)`", text)
    wanted = [*(page.parent / link for link in links), *(ROOT / file for file in files)]
    assert [path for path in wanted if not path.exists()] == []


def test_the_drawn_schedules_match_the_code() -> None:
    text = (ROOT / "docs/explanation/round.md").read_text()
    for build in schedule.SCHEDULES.values():
        assert f"{build.__name__}\n{render(build(3, 4))}\n" in text


def test_the_examples_of_extensions_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/how-to/extend.md").read_text()
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


def test_a_readers_option_file_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/how-to/extend.md").read_text()
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
    (content,) = re.findall(r"```yaml\n(.*?)```", OPTIONS_PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(content.replace("sentences.jsonl", "/dev/null"))
    settled = own_overrides(["model=huggingface", "model.family=bert"], tmp_path / "mine.yaml")
    tree = options_of(composed(settled))
    assert tree["task"]["_target_"].endswith("NamedEntities")
    assert (tree["federation"]["rounds"], tree["data"]["train_file"]) == (30, "/dev/null")


def test_every_option_is_explained() -> None:
    """Each option has a comment in ``conf/``; the reference shows these files."""
    groups = (ROOT / "conf").glob("*/*.yaml")
    files = [file.read_text() for file in groups if file.parent.name != "experiment"]
    row = re.compile(r"^ *(?!_|name:|defaults:)(\w+): (?!\$)[^#\n]*(# .*)?$", re.MULTILINE)
    rows = [found for text in files for found in row.findall(text)]
    assert len({name for name, _ in rows}) > 100
    assert {name for name, _ in rows} - {name for name, comment in rows if comment} == set()
