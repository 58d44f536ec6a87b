"""A person's YAML file: each value is checked as it is read, and an error names its line."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from collapipe.errors import ConfigError

MAX_BYTES = 1_000_000  # a thousand devices take a tenth of it
_SHOWN_CHARACTERS = 40
_LEAST, _MOST = 1e-18, 1e18  # of figures in SI units
_NULL, _TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:str"
# YAML 1.1 takes 1e8 for a text; and what only Python or only YAML takes for a number is none here.
_NUMBER = re.compile(r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping in the file.

    Attributes
    ----------
    file
        As the user named it.
    path
        Where the section stands, such as ``clusters[0].devices[1]``; empty for the whole file.
    line
        Of its beginning, from 1.
    entries
        Keys to YAML nodes.
    """

    file: str
    path: str
    line: int
    entries: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def allow(self, keys: Iterable[str]) -> None:
        """Raises ``ConfigError`` for any other key, with the nearest of these, and for a key that
        is empty: a limit without a figure is not said to be none."""
        known = list(keys)
        for key, node in self.entries.items():
            if key not in known:
                raise _error(
                    self.file,
                    _line(node),
                    f"{self.path or 'the file'} has the unknown key {_short(key)}"
                    f"{nearest(key, known)}",
                )
            if node.tag == _NULL:
                raise _error(
                    self.file,
                    _line(node),
                    f"{self._place(key)}: is empty; write a value or remove the key",
                )

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default the key must be there."""
        return self._number(key, default, lambda value: value > 0, "must be above 0")

    def number_from_0(self, key: str, default: float | None = None) -> float:
        """A number of at least 0."""
        return self._number(key, default, lambda value: value >= 0, "must be at least 0")

    def any_number(self, key: str) -> float:
        """A number of either sign."""
        return self._number(key, None, lambda value: True, "")

    def whole(self, key: str, most: int, default: int | None = None) -> int:
        """A whole number from 1 to ``most``."""
        value = self._number(
            key,
            default,
            lambda value: value == int(value) and 1 <= value <= most,
            f"must be a whole number from 1 to {most:,}",
        )
        return int(value)

    def numbers(self, key: str, per: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` numbers of either sign, one per ``per``."""
        items = self._items(key)
        if len(items) != count:
            raise self.error(
                key, f"{len(items)} numbers for {count} {per}; give one for each, in their order"
            )
        return tuple(_figure(self.file, place, node) for place, node in items)

    def numbers_from_0(self, key: str, per: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` numbers of at least 0."""
        values = self.numbers(key, per, count)
        for value, (place, node) in zip(values, self._items(key), strict=True):
            if value < 0:
                raise _error(
                    self.file, _line(node), f"{place}={_shown(node)}: must not be negative"
                )
        return values

    def text(self, key: str) -> str:
        """A text in one line; a number as it is written counts as one."""
        node = self._needed(key)
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        if not text.strip() or not text.isprintable():
            raise self.error(key, "must be a text of one line")
        return str(text)

    def choice(self, key: str, choices: Iterable[str], default: str) -> str:
        """One of ``choices``."""
        value = self.text(key) if key in self else default
        known = list(choices)
        if value not in known:
            raise self.error(key, f"must be one of {', '.join(known)}")
        return value

    def section(self, key: str) -> "Section":
        """The section under ``key``."""
        return _section(self.file, self._place(key), self._needed(key))

    def sections(self, key: str) -> "tuple[Section, ...]":
        """The sections that ``key`` lists; none where it is absent."""
        return tuple(_section(self.file, *item) for item in self._items(key))

    def fault(self, message: str) -> ConfigError:
        """An error about the whole section."""
        return _error(self.file, self.line, f"{self.path}: {message}")

    def error(self, key: str, message: str) -> ConfigError:
        """An error about the value of ``key``, or about its absence."""
        node = self.entries.get(key)
        if node is None:
            return _error(self.file, self.line, f"{self._place(key)}: {message}")
        shown = f"={_shown(node)}" if isinstance(node, yaml.ScalarNode) else ""
        return _error(self.file, _line(node), f"{self._place(key)}{shown}: {message}")

    def _number(
        self, key: str, default: float | None, is_right: Callable[[float], bool], rule: str
    ) -> float:
        if key not in self and default is not None:
            return default
        value = _figure(self.file, self._place(key), self._needed(key))
        if not is_right(value):
            raise self.error(key, rule)
        return value

    def _items(self, key: str) -> list[tuple[str, Any]]:
        node = self.entries.get(key)
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(key, "must be a list: lines that begin with - , or [ ]")
        place = self._place(key)
        return [(f"{place}[{index}]", item) for index, item in enumerate(node.value)]

    def _needed(self, key: str) -> Any:
        if key not in self:
            raise self.error(key, "is missing; add it")
        return self.entries[key]

    def _place(self, key: str) -> str:
        return f"{self.path}.{key}".lstrip(".")


def load(file: Path) -> Section:
    """The file's outermost section.

    Raises ``ConfigError`` where there is no such file, where it is not UTF-8 or not YAML, where a
    key stands twice, and for aliases (``*name``), which could make a small file endless.
    """
    name = str(file)
    try:
        # libyaml's parser is quicker, but deep nesting ends the process in it.
        root = yaml.compose(_read(file), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _error(name, line, f"not YAML: {_one_line(error.problem or error)}") from error
    except yaml.YAMLError as error:
        raise _error(name, 1, f"not YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise _error(name, 1, "nested too deeply for an inventory") from error
    if root is None:
        raise _error(name, 1, "is empty; docs/examples has inventories to begin with")
    _refuse_aliases(name, root)
    return _section(name, "", root)


def nearest(name: str, known: Iterable[str]) -> str:
    """``; nearest: X``, or what is known where nothing is near."""
    options = list(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; nearest: {near[0]}" if near else f"; known: {', '.join(options)}"


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file}: more than {MAX_BYTES:,} bytes; is this an inventory?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _error(str(file), line, "not UTF-8; save the file as UTF-8") from error


def _refuse_aliases(file: str, root: Any) -> None:
    """An alias is the same node once more."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            raise _error(file, _line(node), "has an alias (*); write the values out")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            waiting.extend(part for pair in node.value for part in pair)


def _section(file: str, path: str, node: Any) -> Section:
    where = path or "the file"
    if not isinstance(node, yaml.MappingNode):
        raise _error(file, _line(node), f"{where} must be keys with values, not {_shown(node)}")
    entries: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(file, _line(key), f"{where} has a key that is no text")
        if key.value in entries:
            raise _error(file, _line(key), f"{where} has {_shown(key)} twice; remove one")
        entries[key.value] = value
    return Section(file, path, _line(node), entries)


def _figure(file: str, place: str, node: Any) -> float:
    shown = _shown(node)
    if not isinstance(node, yaml.ScalarNode):
        raise _error(file, _line(node), f"{place}: must be a number, not {shown}")
    text, plain = node.value, node.style is None
    if plain and text.lower().lstrip("+-").lstrip(".") in ("inf", "nan", "infinity"):
        raise _error(file, _line(node), f"{place}={shown}: must be finite; write a number")
    if not plain or not _NUMBER.fullmatch(text):
        hint = "remove the quotes" if _NUMBER.fullmatch(text) else "such as 64 or 4.0e11, no unit"
        raise _error(file, _line(node), f"{place}={shown}: must be a number; {hint}")
    value = float(text)
    if value and not _LEAST <= abs(value) <= _MOST:
        raise _error(file, _line(node), f"{place}={shown}: too far from 1 for SI units; check it")
    return value


def _shown(node: Any) -> str:
    """The value as it stands in the file, on one line and not too long."""
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "keys with values"
    text = _short(node.value)
    return text if node.style is None and text == node.value else repr(text)


def _short(text: str) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    cut = printable[:_SHOWN_CHARACTERS]
    return cut if cut == printable else f"{cut}…"


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _error(file: str, line: int, message: str) -> ConfigError:
    return ConfigError(f"{file}:{line}: {message}")


def _one_line(text: object) -> str:
    return re.sub(r"\s+", " ", str(text)).strip()
