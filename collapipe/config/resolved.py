"""A run's resolved options: plain values in a tree, and the JSON text that its processes send."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from collapipe.errors import ConfigError, one_line

_MOST_TEXT = 2**18  # characters; the default options have 4,000
_MOST_SHOWN = 100  # characters of an option's name
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
        found = _RESOLVED.validate_python(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"settings: not the options of a run ({one_line(error)})") from error
    check_values("settings: ", found.tree)
    return found


def check_values(where: str, tree: Mapping[Any, Any]) -> None:
    """Raise ``ConfigError`` if an option has NaN, a whole number beyond ±10³⁰, or too many levels;
    its message begins with ``where``."""
    for name, fault in _faults(tree, "", _MOST_DEPTH):
        raise ConfigError(f"{where}{one_line(name)}{fault}")


def _faults(node: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the option and what is wrong with its value.

    Names are cut: a stranger's file could have a long one in front of many values.
    """
    name = name[:_MOST_SHOWN]
    if isinstance(node, float) and math.isnan(node):  # no comparison would refuse it
        yield name, "=nan: must be a number"
    if isinstance(node, int) and abs(node) > _MOST_WHOLE:
        yield name, ": is a number out of range"
    if not depth:
        yield name, ": is nested too deeply"
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _faults(value, f"{name}.{key}" if name else str(key), depth - 1)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _faults(value, f"{name}[{index}]", depth - 1)


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
