"""A run's saved configuration, which may be a stranger's: how much of it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from collapipe.errors import ConfigError, one_line

_MOST_TEXT, _MOST_DEPTH = 100_000, 50  # a run's has a few thousand characters, and a depth of 5
_MOST_WHOLE = 10**30  # beyond, arithmetic fails on whole numbers, and even making a text of them


def read_tree(file: Path) -> tuple[str, dict[Any, Any]]:
    """The text of a run's ``config.yaml``, and its values with references not followed.

    Raises ``ConfigError``, also for what would take time or memory without bounds.
    """
    from omegaconf import OmegaConf  # takes half a second
    from omegaconf.errors import OmegaConfBaseException

    text = read_limited(file)
    check_text(file, text)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: not a saved configuration ({one_line(error)})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: not a saved configuration")
    check_figures(file, tree)
    return text, tree


def value_at(tree: object, name: str) -> Any:
    """What stands at a dotted name; None where nothing does."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def read_limited(file: Path) -> str:
    """The text of a small file that a run wrote. Raises ``ConfigError``."""
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({one_line(error)})") from error
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"{file}: not as a run writes it (more than {_MOST_TEXT:,} characters)")
    return text


def check_text(file: Path, text: str) -> None:
    """Raise ``ConfigError`` for what takes a parser time or memory without bounds, such as aliases
    and deep nesting, or asks it for types of its own: a saved configuration has none of these."""
    depth = 0
    try:
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{file}: has references, which a saved configuration has not")
            if getattr(event, "tag", None):
                raise ConfigError(f"{file}: has tags (!), which a saved configuration has not")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise ConfigError(f"{file}: not a saved configuration (nested too deeply)")
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not a saved configuration ({one_line(error)})") from error


def check_figures(file: Path, node: object) -> None:
    """Raise ``ConfigError`` where a value, already read, holds a number that is none of a run."""
    if isinstance(node, int) and abs(node) > _MOST_WHOLE:
        raise ConfigError(f"{file}: not a saved configuration (a number is no figure of a run)")
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for part in parts:
        check_figures(file, part)
