"""A saved configuration as text: whoever opens it, it may be somebody else's."""

from pathlib import Path

import yaml

from collapipe.errors import ConfigError, one_line

_MOST_TEXT, _MOST_DEPTH = 100_000, 50  # a run's has a few thousand characters, and a depth of 5
_MOST_WHOLE = 10**30  # beyond, arithmetic fails on whole numbers, and even making a text of them
_OPENING = (
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
)
_CLOSING = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


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
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):
                raise ConfigError(f"{file}: has references, which a saved configuration has not")
            if isinstance(token, yaml.TagToken):
                raise ConfigError(f"{file}: has tags (!), which a saved configuration has not")
            depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
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
