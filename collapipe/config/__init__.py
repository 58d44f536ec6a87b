"""Convert a run's options to ``Settings``: each value is checked first, then their combination."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from collapipe.config.contradictions import (
    contradictions,
    faults_in_cluster,
    faults_in_data,
    faults_in_length,
)
from collapipe.config.idle import idle_options
from collapipe.config.resolved import Resolved, parsed
from collapipe.config.settings import Settings as Settings
from collapipe.config.settings import check_members
from collapipe.config.trust import read_saved
from collapipe.errors import ConfigError, faults_of, written
from collapipe.sections import Count, DataSettings, LoraSettings
from collapipe.validation import checked, typed

if TYPE_CHECKING:
    from collapipe.config.own import own_overrides as own_overrides

_SECTIONS = {
    field.name: field.type
    for field in fields(Settings)
    if isinstance(field.type, type) and is_dataclass(field.type)
}
_NUMBERS = {"seed": Annotated[int, Field(ge=0, lt=2**63)], "batch_size": Count}
_WORLD = ("cluster", "channel", "environment")


def __getattr__(name: str) -> Any:
    """Import ``own_overrides`` on first use: it imports Hydra, which takes a second."""
    if name == "own_overrides":
        return resolve_name("collapipe.config.own:own_overrides")
    raise AttributeError(f"module 'collapipe.config' has no attribute {name!r}")


def load(run_config: Mapping[str, Any]) -> Settings:
    """Return the settings of a Flower ServerApp, see ``received``; the strategy is not built."""
    return load_text(received(run_config).text)


def received(run_config: Mapping[str, Any]) -> Resolved:
    """Return the options in a Flower app's run configuration.

    ``settings`` has the options that ``collapipe run`` has resolved. Without them, ``overrides``
    has Hydra overrides in one string, separated as in a shell. Raises ``ConfigError`` for both.
    """
    if text := str(run_config.get("settings", "")):
        if run_config.get("overrides"):
            raise ConfigError("settings and overrides: both are set; leave one of them out")
        return parsed(text)
    from collapipe.config.composing import compose  # imports Hydra
    from collapipe.config.overrides import split

    return compose(split(str(run_config.get("overrides", ""))))


@functools.lru_cache(maxsize=8)  # units of one process share plug-ins and rows
def load_text(text: str) -> Settings:
    """Return the settings of ``Resolved.text``.

    The strategy is not built: only the server needs it, and a unit's machine may lack its class.
    """
    from collapipe.devices.presets import ChannelPreset, ClusterPreset, Radio  # imports numpy

    settings = _settings(parsed(text))
    world = {option: settings.build(option) for option in _WORLD}
    for option, seam in ("cluster", ClusterPreset), ("channel", Radio), ("channel", ChannelPreset):
        check_members(option, world[option], seam)
    _check_there(settings.data)
    in_cluster, in_data = faults_in_cluster(settings, world["cluster"]), faults_in_data(settings)
    faults = contradictions(settings), faults_in_length(settings), in_cluster, in_data
    for fault in chain(*faults, idle_options(settings)):
        raise ConfigError(fault)
    return settings


def load_overrides(overrides: Sequence[str]) -> Settings:
    """Compose ``conf/`` with Hydra overrides and check every value, the strategy's included.

    Raises ``ConfigError``: one line with the option, its value, and how to correct it.
    """
    return complete(outline(overrides))


def outline(overrides: Sequence[str]) -> Settings:
    """Compose as ``load_overrides`` does, and check each value, but not their combination.

    Tasks and models take seconds to import. Raises ``ConfigError`` for an invalid value.
    """
    from collapipe.config.composing import compose  # imports Hydra

    settings = _settings(compose(overrides))
    _check_there(settings.data)
    return settings


def complete(settings: Settings) -> Settings:
    """Check everything that ``outline`` has not checked."""
    _ = settings.planner
    return load_text(settings.text)


def load_saved(file: Path, trusted: Sequence[str] = ()) -> Settings:
    """Return the settings in a run's ``config.yaml``. It may be untrusted, see ``read_saved``."""
    version, tree = read_saved(file, trusted)
    with faults_of(f"{file}: of CollaPipe {version}"):
        settings = _settings(Resolved(tree=tree, run_dir=str(file.parent)))
        for fault in contradictions(settings):
            raise ConfigError(fault)
    return settings


def _settings(resolved: Resolved) -> Settings:
    tree = resolved.tree
    numbers = {name: checked(name, kind, tree.get(name)) for name, kind in _NUMBERS.items()}
    sections = {name: _section(tree, name, kind) for name, kind in _SECTIONS.items()}
    data, trains = sections["data"], sections["framework"].train
    sections["evaluation"] = sections["evaluation"].on_rows_of(data, trains)
    return Settings(**vars(resolved), **numbers, **sections)


def _section(tree: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    section = tree.get(name)
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{name}={written(section)}: must be a section; set its options, {name}.OPTION=…"
        )
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
            raise ConfigError(f"data.{option}={path}: no such {kind}; set a path from {Path.cwd()}")
