"""Overrides or a saved configuration → ``Settings``, each value checked."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from collapipe.config.composing import composed, options_of, run_dir
from collapipe.config.cross_checks import check_agreement, check_segments
from collapipe.config.overrides import split
from collapipe.config.settings import Settings
from collapipe.config.trust import read_saved
from collapipe.config.typed import build, typed
from collapipe.errors import ConfigError
from collapipe.models.cut import cut_at
from collapipe.sections import DataSettings

_SECTIONS = {
    field.name: field.type
    for field in fields(Settings)
    if isinstance(field.type, type) and is_dataclass(field.type)
}


def load(run_config: Mapping[str, Any]) -> Settings:
    """Settings of a Flower app: its run configuration has all overrides in one string.

    The strategy is the server's alone: a unit's machine need not have the user's class.
    """
    return _load(tuple(split(str(run_config.get("overrides", "")))))


def load_overrides(overrides: Sequence[str]) -> Settings:
    """Compose ``conf/`` with Hydra overrides and check every value, those of the strategy too.

    Raises ``ConfigError``: one line with the option, its value, and the way out.
    """
    settings = _load(tuple(overrides))
    _ = settings.planner
    return settings


def load_saved(file: Path, trusted: Sequence[str] = ()) -> Settings:
    """Settings from a run's ``config.yaml``, which may be somebody else's, see ``read_saved``."""
    return _settings(read_saved(file, trusted), str(file.parent))


@functools.lru_cache(maxsize=8)
def _load(overrides: tuple[str, ...]) -> Settings:
    tree = composed(overrides)
    settings = replace(_settings(options_of(tree), run_dir(tree)), overrides=overrides)
    check_segments(settings, settings.build("cluster"))
    settings.build("channel")
    settings.build("environment")
    _check_there(settings.data)
    return settings


def _settings(tree: Mapping[str, Any], run_dir: str) -> Settings:
    sections: dict[str, Any] = {
        name: typed(name, kind, _section(tree, name)) for name, kind in _SECTIONS.items()
    }
    model = sections["adapter"].on(build("model", tree.get("model")))
    settings = Settings(
        **sections,
        seed=_whole(tree, "seed", 0),
        batch_size=_whole(tree, "batch_size", 1),
        task=build("task", tree.get("task")),
        model=cut_at(model, sections["framework"].cut),
        tree=tree,
        run_dir=run_dir,
    )
    check_agreement(settings)
    return settings


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The values of a section; ``data.partitioner`` among them is a plug-in."""
    section = tree.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}={section}: must be a section; set its options, {name}.OPTION=…")
    return {key: section[key] for key in section if (name, key) != ("data", "partitioner")}


def _whole(tree: Mapping[str, Any], option: str, least: int) -> int:
    value = tree.get(option)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(
            f"{option}={value}: must be a whole number of at least {least}, below 2⁶³"
        )
    return value


def _check_there(data: DataSettings) -> None:
    for option, path in data.paths().items():
        kind, there = ("folder", path.is_dir()) if option == "root" else ("file", path.is_file())
        if not there:
            raise ConfigError(f"data.{option}={path}: no such {kind} (seen from {Path.cwd()})")
