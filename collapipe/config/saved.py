"""Read a run's saved configuration, which is untrusted, within limits."""

from pathlib import Path
from typing import Any

import yaml

from collapipe.config.resolved import check_values
from collapipe.errors import ConfigError, one_line

_MOST_TEXT, _MOST_DEPTH = 100_000, 50  # a real one has a few thousand characters, depth 5


def read_tree(file: Path) -> tuple[str, dict[Any, Any]]:
    """Return the text of a run's ``config.yaml``, and its values with unresolved references.

    Raises ``ConfigError`` if the file is invalid or could take unbounded time or memory.
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
    check_values(file, tree)
    return text, tree


def read_limited(file: Path) -> str:
    """Return the text of a small file. Raises ``ConfigError`` if it is unreadable or too long."""
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({one_line(error)})") from error
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"{file}: not as a run writes it (more than {_MOST_TEXT:,} characters)")
    return text


def check_text(file: Path, text: str) -> None:
    """Raise ``ConfigError`` for YAML with aliases, tags or deep nesting.

    They could make a parser take unbounded time or memory, or make objects of other types. A saved
    configuration never has them.
    """
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
