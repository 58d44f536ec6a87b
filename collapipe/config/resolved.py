"""A run's resolved options: plain values in a tree, and the JSON text that its processes send."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from collapipe.errors import ConfigError, one_line

_MOST_TEXT = 2**18  # characters; the default options have 4,000
_MOST_DEPTH = 50  # the default options have 4
_MOST_WHOLE = 10**30  # larger whole numbers make arithmetic fail, and even conversion to text


@dataclass(frozen=True, eq=False, kw_only=True)
class Resolved:
    """The options of a run, not yet checked.

    ``tree`` has all values, without references. It was composed from ``overrides``. ``choices``
    maps each group of options to the chosen file in ``conf/``.
    """

    tree: Mapping[str, Any]
    run_dir: str = ""
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The options as JSON in ASCII, for ``parsed``."""
        return json.dumps({name: getattr(self, name) for name in _NAMES})


_NAMES = [each.name for each in fields(Resolved)]
_RESOLVED = TypeAdapter(Resolved)


def parsed(text: str) -> Resolved:
    """Return the options of ``Resolved.text``. The text may come from another machine.

    Raises ``ConfigError`` if the text is too long, too deep, or not such options.
    """
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"settings: {len(text):,} characters, expected at most {_MOST_TEXT:,}")
    try:
        tree = json.loads(text)
        check_values("settings", tree)
        return _RESOLVED.validate_python(tree)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"settings: not the options of a run ({one_line(error)})") from error


def check_values(where: object, node: object, depth: int = _MOST_DEPTH) -> None:
    """Raise ``ConfigError`` if a value has a whole number beyond ±10³⁰, NaN, or more than ``depth``
    levels."""
    if isinstance(node, float) and math.isnan(node):  # no comparison would refuse it
        raise ConfigError(f"{where}: not the options of a run (a value is not a number)")
    if isinstance(node, int) and abs(node) > _MOST_WHOLE:
        raise ConfigError(f"{where}: not the options of a run (a number is out of range)")
    if not depth:
        raise ConfigError(f"{where}: not the options of a run (nested too deeply)")
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for part in parts:
        check_values(where, part, depth - 1)


def value_at(tree: object, name: str) -> Any:
    """Return the value at a dotted name; None if there is no such name."""
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return values by their dotted names: ``{"a": {"b": 1}}`` → ``{"a.b": 1}``."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def targets(node: Any, option: str = "") -> Iterator[tuple[str, str]]:
    """Yield the option and value of every ``_target_`` below ``node``."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield option, str(value)
            yield from targets(value, f"{option}.{key}".lstrip("."))
    elif isinstance(node, list):
        for value in node:
            yield from targets(value, option)
