"""JSON in a run's folder, which may be untrusted: bounded figures and texts of the right types."""

import json
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from collapipe.errors import ConfigError, cause_of, one_line
from collapipe.validation import fault_of

T = TypeVar("T")
_MOST_REAL, _MOST_WHOLE = 1e150, 1e30  # of figures that are summed, squared and drawn
_MOST_TEXT = 500  # characters of a name or a cause


def text_of(file: Path) -> str:
    """Return the text of a file. Raises ``ConfigError`` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({cause_of(error)})") from error


def checked(kind: TypeAdapter[T], file: Path, number: int, text: str) -> T:
    """Return the validated JSON ``text`` of a file, or of its line ``number``, from 1. Raises
    ``ConfigError``."""
    where = f"{file}:{number}" if number else str(file)
    whole, real = partial(_figure, int, _MOST_WHOLE), partial(_figure, float, _MOST_REAL)
    try:
        tree = json.loads(text, parse_int=whole, parse_float=real, parse_constant=real)
        return valid(kind, where, _shortened(tree))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON as a run writes it ({one_line(error)})") from error


def valid(kind: TypeAdapter[T], where: str, tree: object) -> T:
    """Return a validated tree. Raises ``ConfigError``, which begins with ``where``."""
    try:
        return kind.validate_python(tree)
    except (ValidationError, ConfigError) as error:  # the second one if a plan contradicts itself
        raise ConfigError(f"{where}: {fault_of(error)}") from error


def _shortened(node: Any) -> Any:
    """Shorten all texts to ``_MOST_TEXT`` characters; some are shown a dozen times."""
    if isinstance(node, str):
        return node if len(node) <= _MOST_TEXT else f"{node[:_MOST_TEXT]} …"
    if isinstance(node, dict):
        return {_shortened(key): _shortened(value) for key, value in node.items()}
    return [_shortened(each) for each in node] if isinstance(node, list) else node


def _figure(kind: type[float], most: float, text: str) -> float:
    value = kind(text)
    if not abs(value) < most:  # also refuses NaN
        raise ValueError(f"{text[:20]} is no figure of a run")
    return value
