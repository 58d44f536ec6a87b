"""What pydantic finds wrong, in our form: where, the value, the rule with its bounds."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from collapipe.errors import ConfigError, one_line

_RULES = {
    "missing": "is missing; add it",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be finite",
    "too_short": "has {actual_length} entries, expected at least {min_length}",
    "too_long": "has {actual_length} entries, expected at most {max_length}",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be keys with values",
    "model_type": "must be keys with values",
    "value_error": "{error}",
}


def rule(fault: Mapping[str, Any]) -> str:
    """The rule that one of ``ValidationError.errors()`` breaks, such as ``must be above 0``."""
    context = fault.get("ctx", {})
    if fault["type"] == "literal_error":
        return f"must be one of {context['expected'].replace(' or ', ', ').replace(chr(39), '')}"
    template = _RULES.get(fault["type"])
    return template.format(**context) if template else one_line(fault["msg"])


def dotted(loc: Iterable[str | int]) -> str:
    """``clusters[0].name`` for ``("clusters", 0, "name")``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc).lstrip(".")


def option_error(option: str, error: ValidationError) -> ConfigError:
    """The first fault of a group of options: ``cluster.num_devices=0: must be at least 1``."""
    fault = error.errors()[0]
    return ConfigError(f"{dotted((option, *fault['loc']))}={fault['input']}: {rule(fault)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``; nearest: X``, or what is known where nothing is near."""
    options = list(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; nearest: {near[0]}" if near else f"; known: {', '.join(options)}"
