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


def parse(overrides: Sequence[str]) -> list[Override]:
    """Raises ``ConfigError`` for what is no override."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for override in parsed:
            _check_depth(override.value())
    except HydraException as error:
        raise ConfigError(f"not an override KEY=VALUE: {one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError("brackets in an override are nested too deeply; no option is") from error
    return parsed


def quoted(value: object) -> str:
    """A value as an override may hold it, whatever characters it has."""
    # A backslash counts before what it could escape: OmegaConf's references, Hydra's quotes.
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", literal).replace("'", "\\'")
    return f"'{escaped}'"


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
