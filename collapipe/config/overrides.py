"""Overrides as texts, in Hydra's grammar: read, written, put together, multiplied."""

import itertools
import json
import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from collapipe.errors import ConfigError, one_line

_MOST_DEPTH = 50  # of a value; OmegaConf follows about a hundred
_STRUCTURE = re.compile(r"""[\[{'"]""")  # begins a list, a mapping or a quoted text
_BRACKETS = re.compile(r"""[(\[{'"]""")  # within which a comma separates no choices of a sweep


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them.

    A plain value that Hydra's grammar refuses, such as ``bücher.csv``, ``it's`` or ``Text (EN)``,
    is a text all the same; ``input_line`` of its override has the value quoted. Raises
    ``ConfigError``, which shows how to quote a value that could also be a list or a mapping.
    """
    parser = OverridesParser.create()
    try:
        try:
            parsed = parser.parse_overrides(list(overrides))
        except HydraException:  # one of them: Hydra is quicker with all at once
            parsed = [_parsed(parser, each) for each in overrides]
        for override in parsed:
            _check_depth(override.value())
    except RecursionError as error:
        raise ConfigError("brackets in an override are nested too deeply; no option is") from error
    return parsed


def _parsed(parser: OverridesParser, text: str) -> Override:
    try:
        return parser.parse_override(text)
    except HydraException as error:
        cause = f"not an override KEY=VALUE: {one_line(error)}"
        name, equals, value = text.partition("=")
        choices = [_plain(parser, choice.strip()) for choice in value.split(",")]
        whole = f"{name}{equals}{literal(value, references=True)}"
        try:
            read = parser.parse_override(f"{name}{equals}{','.join(choices)}")
            parser.parse_override(whole)
        except HydraException:
            raise ConfigError(cause) from error
        if _STRUCTURE.match(value) or ("," in value and _BRACKETS.search(value)):
            shown = whole if set(value) & set('"\\$') else f'{name}="{value}"'
            raise ConfigError(f"{cause}; put texts in quotes: {shlex.quote(shown)}") from error
        return read


def _plain(parser: OverridesParser, text: str) -> str:
    """A value, quoted if Hydra's grammar refuses it as it stands."""
    try:
        parser.parse_override(f"key={text}")
    except HydraException:
        return literal(text, references=True)
    return text


def quoted(value: object) -> str:
    """A value as an override may hold it, whatever characters it has."""
    # A backslash counts before what it could escape: OmegaConf's references, Hydra's quotes.
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", literal).replace("'", "\\'")
    return f"'{escaped}'"


def setting(name: str, value: object) -> str:
    """The override that gives the option ``name`` a plain value, taken as it is."""
    return f"{name}={literal(value)}"


def typed(name: str, value: object) -> str:
    """``setting`` as people type it: in quotes only if the text would otherwise be read as
    something else."""
    plain = f"{name}={value}"
    try:
        (read,) = parse([plain])
    except ConfigError:
        return setting(name, value)
    is_text = not read.is_sweep_override() and read.value() == str(value) and "$" not in plain
    return plain if is_text else setting(name, value)


def literal(value: object, *, references: bool = False) -> str:
    """A plain value in the grammar of overrides; texts are taken as they are, or with the
    ``references`` in them. Raises ``ConfigError`` for a key that cannot be written."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(literal(each, references=references) for each in value)}]"
    if isinstance(value, dict):
        odd = [key for key in value if not re.fullmatch(r"[\w.-]+", str(key))]
        if odd:
            raise ConfigError(f"{one_line(odd[0])}: cannot be the name of an option")
        pairs = (f"{key}: {literal(each, references=references)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, int | float):
        return repr(value)
    if references and "${" in str(value):
        return "'" + str(value).replace("'", "\\'") + "'"
    return quoted(value)


def _check_depth(value: object, left: int = _MOST_DEPTH) -> None:
    """Raise ``RecursionError`` as whoever takes a deeper value would, but always at one depth."""
    if not left:
        raise RecursionError
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_depth(part, left - 1)


def split(text: str) -> list[str]:
    """The overrides that ``shlex.join`` put in one string. Raises ``ConfigError``."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides={text!r}: cannot be split into options ({error})") from error


def merged(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """``overrides`` without those that ``later`` ones replace, then these."""
    keys = {override.key_or_group for override in parse(later)}
    kept = [each for each in parse(overrides) if each.key_or_group not in keys]
    return [*(str(each.input_line) for each in kept), *later]


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination of ``a=1,2`` and ``b=range(3)``."""
    choices = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [str(each.input_line)]
        for each in parse(overrides)
    ]
    return [list(job) for job in itertools.product(*choices)]
