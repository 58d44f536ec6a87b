"""Compose ``conf/`` and overrides into one tree, with Hydra."""

import functools
import pickle
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from collapipe.config.overrides import parse, swept
from collapipe.config.resolved import Resolved, check_values, value_at
from collapipe.config.settings import CONF
from collapipe.errors import ConfigError, one_line, written
from collapipe.process.folders import in_home
from collapipe.validation import nearest

OWN = Path("conf")  # a user's files, in the current folder
GROUPS = frozenset(path.name for path in CONF.iterdir() if path.is_dir())
_OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir")  # Hydra's other options would have no effect
PATHS = (  # options that name a file or folder of this machine
    *("data.root", "task.root"),
    *(f"data.{split}_file" for split in ("train", "validation", "test")),
    *("task.chat_template", "adapter.path", "cluster.file", "channel.file"),
)
FOLDERS_OR_NAMES = "data.name", "data.tokenizer", "model.name"  # a folder, or a name at the hub
_composing = threading.Lock()  # Hydra keeps its state in a process-wide singleton


def compose(overrides: Sequence[str]) -> Resolved:
    """Compose ``conf/`` with Hydra overrides; the values are not checked yet.

    Raises ``ConfigError`` for an unknown option or choice, or if a value is missing.
    """
    tree = composed(overrides)
    options = options_of(tree)
    check_values("", options)
    for name in (*PATHS, *FOLDERS_OR_NAMES, "runtime.federation"):
        section, _, option = name.partition(".")
        if isinstance(given := value_at(options, name), str):
            options[section][option] = in_home(given)
    if isinstance(adapter := options.get("adapter"), dict) and adapter.get("path"):
        adapter |= _of_adapters(str(adapter["path"]), adapter, overrides)
    return Resolved(
        tree=options, run_dir=run_dir(tree), overrides=tuple(overrides), choices=choices_of(tree)
    )


def _of_adapters(
    path: str, given: Mapping[str, Any], overrides: Sequence[str]
) -> Mapping[str, Any]:
    """Return the options that a folder of adapters decides.

    Raises ``ConfigError`` if ``overrides`` set one of them to another value.
    """
    from collapipe.models.adapter_folder import options_in  # takes seconds

    decided = options_in(Path(path))
    named = {each.key_or_group for each in parse(overrides)}
    for name, value in decided.items():
        own = given[name]
        if f"adapter.{name}" in named and own != value and not _name_all(own, value):
            raise ConfigError(
                f"adapter.{name}={own}: the adapters in adapter.path={path} have {value}; leave "
                "the option out, or begin with new ones"
            )
    return decided


def _name_all(targets: object, paths: object) -> bool:
    """Whether ``targets`` are lists of the ends of layers' ``paths``, and each has its end."""
    if not isinstance(targets, list) or not isinstance(paths, list):
        return False
    ends = [{path for path in paths if f".{path}".endswith(f".{each}")} for each in targets]
    return all(ends) and set().union(*ends) == {*paths}


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return the tree that Hydra composes; only its folders are used of the section ``hydra``.

    Hydra composes each set of group choices once. Other options are then set in a copy, many times
    as fast and with the same result. Raises ``ConfigError`` for an unknown option or choice.
    """
    parsed = parse(overrides)
    for override in parsed:
        check_choices(override)
    choices = [str(override.input_line) for override in parsed if chooses(override)]
    values = [override for override in parsed if not chooses(override)]
    base, names = _of_groups(tuple(choices))
    known: AbstractSet[str] = names
    for override in parsed:
        known = _check_option(override, known)
    if not all(map(_sets, values)):
        return composed_by_hydra([text for each in parsed for text in _for_hydra(each, names)])
    tree: DictConfig = pickle.loads(base)  # noqa: S301, our own bytes
    try:
        for override in values:
            OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{one_line(error)} (overrides: {shlex.join(overrides)})") from error
    return tree


def composed_by_hydra(overrides: Sequence[str]) -> DictConfig:
    """Return the tree that Hydra composes, without checking names.

    Raises ``ConfigError`` if Hydra fails.
    """
    try:
        with _composing:
            GlobalHydra.instance().clear()
            with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
                return hydra.compose("config", list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{one_line(error)} (overrides: {shlex.join(overrides)})") from error


def options_of(tree: DictConfig) -> dict[str, Any]:
    """Return all options except Hydra's, resolved. Raises ``ConfigError`` for a missing value."""
    plain = functools.partial(OmegaConf.to_container, resolve=True, throw_on_missing=True)
    try:
        return {
            str(key): plain(value) if OmegaConf.is_config(value) else value
            for key, value in tree.items()
            if key != "hydra"
        }
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value; set {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from error


def unresolved(tree: DictConfig) -> dict[str, Any]:
    """Return all options except Hydra's, with unresolved references."""
    plain = cast(dict[str, Any], OmegaConf.to_container(tree))
    del plain["hydra"]
    return plain


def choices_of(tree: DictConfig) -> dict[str, str]:
    """Return the chosen file of each group of options, such as ``{"strategy": "dssra"}``."""
    return {
        str(group): str(choice)
        for group, choice in tree.hydra.runtime.choices.items()
        if choice is not None and not str(group).startswith("hydra/")
    }


def run_dir(tree: DictConfig) -> str:
    """Return the folder of a run. Raises ``ConfigError`` if the option is invalid."""
    return _folder(tree, "hydra.run.dir")


def sweep_dir(overrides: Sequence[str]) -> str:
    """Return the folder of a sweep's jobs. Raises ``ConfigError`` if the option is invalid."""
    given = [each for each in parse(overrides) if str(each.key_or_group).startswith("hydra.")]
    for each in given:
        if each.key_or_group == "hydra.run.dir":
            raise ConfigError(f"{each.input_line}: has no effect with -m; set hydra.sweep.dir")
        if each.key_or_group == "hydra.sweep.dir" and each.is_sweep_override():
            raise ConfigError(f"{each.input_line}: a sweep has one folder; set one value")
    tree = composed([str(each.input_line) for each in given])
    return _folder(tree, "hydra.sweep.dir")


def _folder(tree: DictConfig, option: str) -> str:
    try:
        folder = str(OmegaConf.select(tree, option))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{option}: {one_line(error)}") from error
    if not folder.strip():
        raise ConfigError(f"{option}=: must name a folder; . is the current one")
    return in_home(folder)


@functools.lru_cache(maxsize=64)
def _of_groups(choices: tuple[str, ...]) -> tuple[bytes, frozenset[str]]:
    """Return the tree with only these group choices, pickled, and the names of all its options."""
    tree = composed_by_hydra(choices)
    OmegaConf.clear_cache(tree)  # it has the time, and later runs begin later
    return pickle.dumps(tree), known_names(unresolved(tree))


def chooses(override: Override) -> bool:
    """Whether an override chooses a group's file; Hydra merges a mapping instead."""
    return override.key_or_group in GROUPS and not isinstance(override.value(), dict)


def _sets(override: Override) -> bool:
    """Whether an override sets one option to one value without referring to Hydra's section."""
    text = str(override.input_line)
    of_hydra = "hydra" in text and "${" in text
    plain = override.type is OverrideType.CHANGE and override.package is None
    return plain and not of_hydra


def _for_hydra(override: Override, names: AbstractSet[str]) -> list[str]:
    """Return the override; one that deletes an option first gives it a value, because Hydra takes
    an option that is null for a missing one."""
    name, text = override.key_or_group, str(override.input_line)
    deletes = text == f"~{name}" and name in names - GROUPS
    return [f"{name}=0", text] if deletes else [text]


def check_choices(override: Override) -> None:
    """Raise ``ConfigError`` if an override chooses a file that ``conf/`` lacks, or has several
    values."""
    if override.is_sweep_override():
        swept(override)  # -m refuses some
        given = shlex.quote(str(override.input_line))
        raise ConfigError(f"{given}: several values need -m: collapipe run -m {given}")
    group, value = override.key_or_group, override.value()
    deletes = override.is_delete() and value is None
    if group not in GROUPS or isinstance(value, dict) or deletes:
        return
    for choice in map(written, value if isinstance(value, list) else [value]):
        if not (CONF / group / f"{choice}.yaml").is_file():
            files = *(CONF / group).glob("*.yaml"), *(OWN / group).glob("*.yaml")
            known = sorted({path.stem for path in files})
            raise ConfigError(
                f"{group}={choice}: there is no conf/{group}/{choice}.yaml"
                f"{nearest(choice, known)}; known: {', '.join(known)}"
            )


def _check_option(override: Override, known: AbstractSet[str]) -> AbstractSet[str]:
    """Check an override's name, and return ``known`` with the names that the override adds."""
    name = override.key_or_group
    if override.is_add() or override.is_force_add():
        return known | {name, *(f"{name}.{each}" for each in names_in(override.value()))}
    check_name(name, known)
    if name.startswith("hydra.") and override.value() is None:
        raise ConfigError(f"{override.input_line}: must name a folder; . is the current one")
    return known


def known_names(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted names of all values, sections and groups of a configuration."""
    return frozenset({*names_in(options), *GROUPS, *_OF_HYDRA})


def check_name(name: str, known: AbstractSet[str]) -> None:
    """Raise ``ConfigError`` for an option that is not ``known``."""
    if name not in known:
        group, _, option = name.partition(".")
        if group in GROUPS and (choices := _choices_with(group, option)):
            raise ConfigError(f"unknown option {name}: add {' or '.join(choices)} to set it")
        plugins = [each.removesuffix("_target_") for each in known if each.endswith("._target_")]
        own = f"; an option of your own class is added: +{name}=…"
        adding = own if name.startswith(tuple(plugins)) else ""
        top = sorted(each for each in known if "." not in each)
        places = [each for each in known if each.rpartition(".")[0] == name.rpartition(".")[0]]
        near = nearest(name, sorted(known)) or f"; known: {', '.join(sorted(places) or top)}"
        raise ConfigError(f"unknown option {one_line(name)}{near}{adding}")


def _choices_with(group: str, option: str) -> list[str]:
    """Return the choices of a group, such as ``cluster=devices``, whose files have an option."""
    files = sorted((CONF / group).glob("*.yaml"))
    line = re.compile(rf"^{re.escape(option)}:", re.MULTILINE)
    return [f"{group}={file.stem}" for file in files if line.search(file.read_text("utf-8"))]


def names_in(node: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all values and mappings in a tree."""
    if not isinstance(node, Mapping):
        return []
    return [
        name
        for key, value in node.items()
        for name in (f"{prefix}{key}", *names_in(value, f"{prefix}{key}."))
    ]
