"""What the documentation says of options, files and extensions is so."""

import re
from pathlib import Path

import pytest
from federated import run

from collapipe.config import Settings, load_overrides
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
    for build in (schedule.gpipe, schedule.one_f_one_b):
        assert f"{build.__name__}\n{schedule.render(build(3, 4))}\n" in text


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


def told(settings: Settings) -> tuple[object, str]:
    """All values, and the run's folder without the time in it."""
    return settings.tree, re.sub(r"\d", "#", settings.run_dir)
