"""Overrides as texts in Hydra's grammar: parse, write, merge and expand them."""

import functools
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from collapipe.errors import ConfigError, one_line

_MOST_DEPTH = 50  # of a value; OmegaConf's limit is about a hundred
_MOST_SHOWN = 100  # characters of an override
_STRUCTURE = re.compile(r"""[\[{'"]""")  # begins a list, a mapping or a quoted text
_BRACKETS = re.compile(r"""[(\[{'"]""")  # a comma inside does not separate choices of a sweep


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra.

    A plain value that Hydra's grammar refuses, such as ``bücher.csv``, ``it's`` or ``Text (EN)``,
    is taken as text, and ``input_line`` of its override has it in quotes. Raises ``ConfigError``
    for invalid overrides; it shows how to quote a value that could also be a list or a mapping.
    """
    # A text would be read letter by letter, and an iterator only once.
    if not isinstance(overrides, list | tuple) or not all(isinstance(o, str) for o in overrides):
        shown = [overrides] if isinstance(overrides, str) else ["KEY=VALUE"]
        raise ConfigError(f"overrides={overrides!r}: must be a list of texts: {shown}")
    try:
        parsed = list(map(_parsed, overrides))
        for override in parsed:
            if not override.key_or_group:
                text = str(override.input_line)[:_MOST_SHOWN]
                raise ConfigError(f"{text}: has no name; write KEY=VALUE")
            _check_depth(override.value())
    except RecursionError as error:
        raise ConfigError("brackets in an override are nested too deeply; no option is") from error
    return parsed


@functools.lru_cache(maxsize=1024)
def _by_grammar(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _parsed(text: str) -> Override:
    try:
        return _by_grammar(text)
    except HydraException as error:
        name, equals, value = text.partition("=")
        if not equals:
            key = text.strip() or "KEY"
            raise ConfigError(f"{text!r}: not an override KEY=VALUE; write {key}=VALUE") from error
        if "," in name:
            dotted = f"{name.replace(',', '.')}={value}"
            raise ConfigError(f"{text}: has a comma in the name; write {dotted}") from error
        if value.rstrip().endswith(","):
            raise ConfigError(f"{text}: ends in a comma; write KEY=V1,V2 without blanks") from error
        cause = f"{text[:_MOST_SHOWN]}: not an override KEY=VALUE: {one_line(error)}"
        choices = [_plain(choice.strip()) for choice in value.split(",")]
        whole = f"{name}{equals}{literal(value, references=True)}"
        try:
            read = _by_grammar(f"{name}{equals}{','.join(choices)}")
            _by_grammar(whole)
        except HydraException:
            raise ConfigError(cause) from error
        if _STRUCTURE.match(value) or ("," in value and _BRACKETS.search(value)):
            shown = whole if set(value) & set('"\\$') else f'{name}="{value}"'
            raise ConfigError(f"{cause}; put texts in quotes: {shlex.quote(shown)}") from error
        return read


def _plain(text: str) -> str:
    """Return a value, in quotes if Hydra's grammar refuses it without."""
    try:
        _by_grammar(f"key={text}")
    except HydraException:
        return literal(text, references=True)
    return text


def setting(name: str, value: object) -> str:
    """Return the override that sets the option ``name`` to exactly this value."""
    return f"{name}={literal(value)}"


def typed(name: str, value: object) -> str:
    """Return ``setting`` in its shortest form: with quotes only if Hydra needs them."""
    plain = f"{name}={value}"
    try:
        (read,) = parse([plain])
    except ConfigError:
        return setting(name, value)
    is_text = not read.is_sweep_override() and read.value() == str(value) and "$" not in plain
    return plain if is_text else setting(name, value)


def literal(value: object, *, references: bool = False) -> str:
    """Write a plain value in the grammar of overrides.

    Texts are literal; with ``references``, OmegaConf resolves ``${…}`` in them. Raises
    ``ConfigError`` for a key that cannot be written.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(literal(each, references=references) for each in value)}]"
    if isinstance(value, dict):
        invalid = [key for key in value if not re.fullmatch(r"[\w.-]+", str(key))]
        if invalid:
            raise ConfigError(f"{one_line(invalid[0])}: cannot be the name of an option; rename it")
        pairs = (f"{key}: {literal(each, references=references)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, int | float):
        return repr(value)
    if references and "${" in str(value):
        return "'" + str(value).replace("'", "\\'") + "'"
    # Escape backslashes only before OmegaConf's references and Hydra's quotes.
    plain = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", plain).replace("'", "\\'")
    return f"'{escaped}'"


def _check_depth(value: object, left: int = _MOST_DEPTH) -> None:
    """Raise ``RecursionError`` if a value is nested deeper than ``left`` levels."""
    if not left:
        raise RecursionError
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_depth(part, left - 1)


def split(text: str) -> list[str]:
    """Split a string of ``shlex.join`` into overrides. Raises ``ConfigError`` if that fails."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides={text!r}: cannot be split into options ({error})") from error


def merged(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return ``overrides`` followed by ``later``, which replace overrides of the same option."""
    keys = {override.key_or_group for override in parse(later)}
    kept = [each for each in parse(overrides) if each.key_or_group not in keys]
    return [*(str(each.input_line) for each in kept), *later]


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Return the jobs of a sweep: all combinations of values such as ``a=1,2 b=range(3)``."""
    choices = [
        [f"{each.get_key_element()}={value}" for value in swept(each)]
        if each.is_sweep_override()
        else [str(each.input_line)]
        for each in parse(overrides)
    ]
    return [list(job) for job in itertools.product(*choices)]


def swept(override: Override) -> Iterator[str]:
    """Return the values of an override such as ``a=1,2``.

    Raises ``ConfigError`` if there are none or if they cannot be listed, as those of ``a=glob(*)``.
    """
    try:
        has_values = any(True for _ in override.sweep_string_iterator())
    except (HydraException, ValueError) as error:  # ValueError: a step of 0
        raise ConfigError(
            f"{override.input_line}: has no list of values; -m takes KEY=V1,V2 or KEY=range(…)"
        ) from error
    if not has_values:
        raise ConfigError(f"{override.input_line}: has no values; correct the ends of the range")
    return override.sweep_string_iterator()
