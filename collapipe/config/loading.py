"""Overrides or a saved configuration → ``Settings``, each value checked."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from collapipe.config.composing import choices_of, composed, options_of, run_dir
from collapipe.config.cross_checks import check_effects, check_segments, check_together
from collapipe.config.overrides import split
from collapipe.config.settings import Settings
from collapipe.config.trust import read_saved
from collapipe.config.typed import build
from collapipe.errors import ConfigError
from collapipe.sections import Count, DataSettings, LoraSettings
from collapipe.validation import checked, typed

_SECTIONS = {
    field.name: field.type
    for field in fields(Settings)
    if isinstance(field.type, type) and is_dataclass(field.type)
}
_NUMBERS = {"seed": Annotated[int, Field(ge=0, lt=2**63)], "batch_size": Count}
_WORLD = ("cluster", "channel", "environment")


def load(run_config: Mapping[str, Any]) -> Settings:
    """Settings of a Flower app: its run configuration has all overrides in one string.

    The strategy is the server's alone: a unit's machine need not have the user's class.
    """
    return _load(tuple(split(str(run_config.get("overrides", "")))))


def load_overrides(overrides: Sequence[str]) -> Settings:
    """Compose ``conf/`` with Hydra overrides and check every value, those of the strategy too.

    Raises ``ConfigError``: one line with the option, its value, and the way out.
    """
    options, *_ = _composed(tuple(overrides))
    build("strategy", options.get("strategy"))
    return _load(tuple(overrides))


def load_saved(file: Path, trusted: Sequence[str] = ()) -> Settings:
    """Settings from a run's ``config.yaml``, which may be somebody else's, see ``read_saved``."""
    tree = read_saved(file, trusted)
    return _settings(tree, _sections(tree), str(file.parent))


@functools.lru_cache(maxsize=8)
def _load(overrides: tuple[str, ...]) -> Settings:
    """What is quick is checked first: tasks and models import datasets and torch."""
    tree, folder, choices = _composed(overrides)
    sections = _sections(tree)
    world = {option: build(option, tree.get(option)) for option in _WORLD}
    _check_there(sections["data"])
    settings = _settings(tree, sections, folder)
    settings = replace(settings, overrides=overrides, choices=choices)
    check_segments(settings, world["cluster"])
    check_effects(settings)
    return settings


@functools.lru_cache(maxsize=8)
def _composed(overrides: tuple[str, ...]) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The options, the run's folder, and the file that each group of options came from."""
    tree = composed(overrides)
    return options_of(tree), run_dir(tree), choices_of(tree)


def _settings(tree: Mapping[str, Any], sections: Mapping[str, Any], run_dir: str) -> Settings:
    task = build("task", tree.get("task"))
    model = build("model", tree.get("model"))

    from collapipe.models.cut import cut_at
    from collapipe.models.lora import with_adapters

    settings = Settings(
        **sections,
        task=task,
        model=cut_at(with_adapters(model, sections["adapter"]), sections["framework"].cut),
        tree=tree,
        run_dir=run_dir,
    )
    check_together(settings)
    return settings


def _sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and numbers as ``Settings`` has them, each value checked by itself."""
    numbers = {name: checked(name, kind, tree.get(name)) for name, kind in _NUMBERS.items()}
    return numbers | {name: _section(tree, name, kind) for name, kind in _SECTIONS.items()}


def _section(tree: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    section = tree.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}={section}: must be a section; set its options, {name}.OPTION=…")
    values = dict(section)
    if name == "data":
        values.pop("partitioner", None)  # a plug-in
    if name == "adapter" and values.get("name") == "lora":
        kind = LoraSettings
    return typed(name, kind, values)


def _check_there(data: DataSettings) -> None:
    for option, path in data.paths().items():
        kind, there = ("folder", path.is_dir()) if option == "root" else ("file", path.is_file())
        if not there:
            raise ConfigError(f"data.{option}={path}: no such {kind} (seen from {Path.cwd()})")
