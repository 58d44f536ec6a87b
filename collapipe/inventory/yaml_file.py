"""Read a user's YAML file as plain values for pydantic, with a line for each error."""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from collapipe.errors import ConfigError, is_printable, one_line
from collapipe.validation import dotted, rule

MAX_BYTES = 1_000_000  # a thousand devices take a tenth of it
_SHOWN_CHARACTERS = 40
_NULL = "tag:yaml.org,2002:null"
Loc = tuple[str | int, ...]  # such as ("clusters", 0, "name")
Parsed = TypeVar("Parsed", bound=BaseModel)


class Scalar(str):
    """A scalar as written in the file; ``is_quoted`` distinguishes ``'64'`` from ``64``."""

    __slots__ = ("is_quoted",)
    is_quoted: bool


class PlacedError(ValueError):
    """A validator's error at ``loc``, relative to the section that it checks."""

    def __init__(self, loc: Loc, message: str) -> None:
        super().__init__(message)
        self.loc = loc


class UnknownKeyError(PlacedError):
    """An unknown key, reported before all other errors: a missing key may only be misspelt."""


class Document:
    """A YAML file without aliases; keys of mappings are unique texts."""

    def __init__(self, file: str, root: Any) -> None:
        self.file = file
        self._places: dict[Loc, tuple[Any, int]] = {}  # node and line of each key and item
        self._values = self._plain((), root, _line(root))

    def parse(self, kind: type[Parsed]) -> Parsed:
        """Return the file as a ``kind``. Raises ``ConfigError`` with the first fault's line."""
        try:
            return kind.model_validate(self._values)
        except ValidationError as error:
            faults = [(each, each.get("ctx", {}).get("error")) for each in error.errors()]
            details, own = min(faults, key=lambda pair: not isinstance(pair[1], UnknownKeyError))
            loc = (*details["loc"], *(own.loc if isinstance(own, PlacedError) else ()))
            node = self._find(loc)[0]
            empty = node is not None and node.tag == _NULL
            broken = "is empty; write a value or remove the key" if empty else rule(details)
            raise self.error(loc, broken) from error

    def error(self, loc: Loc, message: str) -> ConfigError:
        """Return an error about the value at ``loc``, or about its absence."""
        node = self._find(loc)[0]
        shown = f"={_shown(node)}" if isinstance(node, yaml.ScalarNode) and node.value else ""
        place = dotted(key if isinstance(key, int) else _short(key) for key in loc) or "the file"
        return _error(self.file, self.line(loc), f"{place}{shown}: {message}")

    def line(self, loc: Loc) -> int:
        """Return the line, from 1, of a key or item; if absent, the line of its parent."""
        return self._find(loc)[1]

    def node(self, loc: Loc) -> Any:
        """Return the YAML node of the value at ``loc``; its marks have its place in the text."""
        return self._find(loc)[0]

    def _find(self, loc: Loc) -> tuple[Any, int]:
        """Return the YAML node at ``loc``, None if absent, and its line."""
        return self._places.get(loc) or (None, self.line(loc[:-1]))

    def _plain(self, loc: Loc, node: Any, line: int) -> Any:
        """Return the node's value for pydantic, and remember its place."""
        self._places[loc] = node, line
        if isinstance(node, yaml.ScalarNode):
            scalar = Scalar(node.value)
            scalar.is_quoted = node.style is not None
            return scalar
        if isinstance(node, yaml.SequenceNode):
            return [self._plain((*loc, n), item, _line(item)) for n, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        place = dotted(loc) or "the file"
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(self.file, _line(key), f"{place} has a key that is no text")
            if key.value in values:
                twice = f"{place} has {_shown(key)} twice; remove one"
                raise _error(self.file, _line(key), twice)
            values[key.value] = self._plain((*loc, key.value), value, _line(key))
        return values


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses aliases (``*name``), with which a small file could expand without limit.

    libyaml's parser is faster, but deep nesting crashes it.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "has an alias (*); write the values out", mark
            )
        return super().compose_node(parent, index)


def load(file: Path) -> Document:
    """Read a file of at most ``MAX_BYTES``.

    Raises ``ConfigError`` if the file does not exist, is not UTF-8 or YAML, or has aliases.
    """
    return from_text(file, read(file))


def from_text(file: Path, text: str) -> Document:
    """Parse ``text``, the content of ``file``. Raises as ``load`` does."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = mark.line + 1 if mark else 1
        raise _error(file, line, f"not YAML: {one_line(problem or error)}") from error
    except RecursionError as error:
        raise _error(file, 1, "nested too deeply; see docs/examples") from error
    if root is None:
        raise _error(file, 1, "is empty; docs/examples has inventories to begin with")
    return Document(str(file), root)


def read(file: Path) -> str:
    """Read the text with its original line ends. Raises as ``load`` does."""
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
        raise _error(file, line, "not UTF-8; save the file as UTF-8") from error


def _shown(node: Any) -> str:
    """Return the value as written in the file, shortened to one line."""
    text = _short(node.value)
    return text if node.style is None and text == node.value else repr(text)


def _short(text: str) -> str:
    printable = "".join(letter if is_printable(letter) else " " for letter in text)
    shown = printable[:_SHOWN_CHARACTERS]
    return shown if shown == printable else f"{shown}…"


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _error(file: str | Path, line: int, message: str) -> ConfigError:
    return ConfigError(f"{file}:{line}: {message}")
