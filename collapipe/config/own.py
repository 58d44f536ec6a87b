"""A user's options: a file of options, and files in the current folder's ``conf/``.

Both are converted to overrides of the built-in ``conf/``, so Flower's processes and resumed runs do
not need the user's files. Saved runs of others are not read here.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from collapipe.config.composing import (
    GROUPS,
    OWN,
    check_choices,
    check_name,
    choices_of,
    chooses,
    composed,
    composed_by_hydra,
    known_names,
    names_in,
    options_of,
    unresolved,
)
from collapipe.config.overrides import literal, parse, setting
from collapipe.config.resolved import value_at
from collapipe.config.settings import CONF
from collapipe.errors import ConfigError, cause_of, faults_of

_FOLLOWING = "task_model"  # a group whose choice follows from two other groups


def own_overrides(overrides: Sequence[str], config_file: Path | None = None) -> list[str]:
    """Convert the options of ``config_file``, then ``overrides``, to overrides of built-in files.

    The file has options as YAML, such as ``federation: {rounds: 3}`` and ``task: ner``, or is a
    run's ``config.yaml``. For a choice ``GROUP=NAME``, the current folder's
    ``conf/GROUP/NAME.yaml`` is used if there is no built-in file. Raises ``ConfigError`` for an
    unreadable file or an unknown option.
    """
    given = {} if config_file is None else _read(config_file)
    # ``experiment`` takes a list; a mapping sets options and chooses no file.
    picked = {
        key for key, value in given.items() if key in GROUPS and isinstance(value, str | list)
    }
    choices = [setting(key, given[key]) for key in given if key in picked]
    parsed = parse(overrides)
    choices += [str(each.input_line) for each in parsed if chooses(each)]
    for each in parse(choices):
        if not _is_own(each):
            check_choices(each)
    if config_file is None and not any(map(_is_own, parse(choices))):
        return list(overrides)
    own = [f"hydra.searchpath=[{literal(f'file://{OWN.resolve()}')}]"] if OWN.is_dir() else []
    wanted = composed_by_hydra([*choices, *own]) if own else composed(choices)
    if config_file is not None:
        _set(wanted, {key: given[key] for key in given if key not in picked}, config_file)
    return _settled(wanted, [str(each.input_line) for each in parsed if not chooses(each)])


def _settled(wanted: DictConfig, values: Sequence[str]) -> list[str]:
    """Return overrides that make ``wanted``, with references resolved, then ``values``."""
    defaults = choices_of(composed([]))
    built_in = [  # choices of built-in files, also those that a user's file made
        f"{group}={name}"
        for group, name in choices_of(wanted).items()
        if group != _FOLLOWING and name != defaults.get(group) and not _lacks(group, name)
    ]
    changes = list(_differences(unresolved(composed(built_in)), unresolved(wanted)))
    settled = [*built_in, *changes, *values]
    options = options_of(composed(settled))
    for each in parse(changes):
        if "${" in str(each.input_line):
            value = value_at(options, each.key_or_group)
            settled.append(setting(each.key_or_group, value))
    return settled


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--config {file}: cannot be read ({cause_of(error)})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {file}: must be options with values, as config.yaml of a run")
    return {str(key): value for key, value in tree.items()}


def _is_own(choice: Override) -> bool:
    value = choice.value()
    names = value if isinstance(value, list) else [value]
    return any(_lacks(choice.key_or_group, str(name)) for name in names)


def _lacks(group: str, name: str) -> bool:
    """Whether only the user has the file."""
    file = f"{group}/{name}.yaml"
    return not (CONF / file).is_file() and (OWN / file).is_file()


def _set(tree: DictConfig, given: Mapping[str, Any], file: Path) -> None:
    """Set the file's values: a section with a plug-in's class replaces one, others are merged."""
    known = known_names(unresolved(tree))
    for key, value in given.items():
        is_section = isinstance(tree.get(key), DictConfig)
        if key == "hydra" or (is_section and not isinstance(value, dict)):
            raise ConfigError(f"--config {file}: {key}: must be options of a run, with values")
        part = value.get("partitioner") if key == "data" and isinstance(value, dict) else None
        if isinstance(value, dict) and ("_target_" in value or key == "adapter"):
            tree[key] = value
            continue
        for name in names_in({key: value}):
            if not name.startswith(("data.partitioner.", "model.config.")):
                with faults_of(f"--config {file}"):
                    check_name(name, known)
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
        if isinstance(part, dict) and "_target_" in part:
            tree.data.partitioner = part


def _differences(base: Any, wanted: Any, prefix: str = "") -> Iterator[str]:
    """Yield overrides that turn ``base`` into ``wanted``."""
    for key in sorted(base.keys() - wanted.keys()):
        yield f"~{prefix}{key}"
    for key, value in wanted.items():
        old, name = base.get(key), f"{prefix}{key}"
        if key not in base:
            yield f"+{name}={literal(value, references=True)}"
        elif isinstance(old, dict) and isinstance(value, dict) and old and value:
            yield from _differences(old, value, f"{name}.")
        elif old != value:
            yield f"{name}={literal(value, references=True)}"
