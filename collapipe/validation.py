"""Convert plain values to typed ones with pydantic, and its errors to ``ConfigError``."""

import difflib
import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from collapipe.errors import ConfigError, one_line, written

T = TypeVar("T")
_LAX = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, extra="forbid")
_NEAR = 0.7  # difflib's ratio: one letter of four may be wrong
_MOST_FAULTS = 1000  # of which the first is shown: pydantic makes a kilobyte of each
_RULES = {  # beginning of pydantic's name of an error → text
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "finite_number": "must be a finite number",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "tuple": "must be a list, [A, B]",
    "list": "must be a list, [A, B]",
    "dict_type": "must be keys with values",
    "dataclass_type": "must be keys with values",
    "model_type": "must be keys with values",
    "string_too_long": "must be a text of at most {max_length} characters",
    "string_type": "must be a text",
    "missing": "is missing; add it",
    "too_long": "has {actual_length} entries, expected at most {max_length}",
    "too_short": "has {actual_length} entries, expected at least {min_length}",
    "value_error": "{error}",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; nearest: X`` for a similar name, or the same name in another section; else ""."""
    names = sorted((each for each in known if not name.startswith(f"{each}.")), key=len)
    last = name.rsplit(".", 1)[-1]
    ends = {each: each.rsplit(".", 1)[-1] for each in names}
    same = [each for each, end in ends.items() if end == last]
    section = {end: each for each, end in ends.items() if each == name.removesuffix(last) + end}
    close = difflib.get_close_matches(last, section, n=1, cutoff=_NEAR)
    close = close or [end for end in section if last in end.split("_")]
    far = [] if section else difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    near = same or [section[end] for end in close] or far
    return f"; nearest: {near[0]}" if near else ""


def typed(option: str, kind: type[T], values: object) -> T:
    """Convert ``values`` to the dataclass ``kind``; each field is checked against its annotation.

    Raises ``ConfigError`` with the option, its value and the expected values.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{option}={one_line(values)}: must be keys with values")
    known = _types(cast(Hashable, kind))
    for name in values:
        if name not in known:
            near = nearest(str(name), known)
            has = f"{kind.__name__} has {', '.join(known) or 'no options'}"
            way = f"leave it out; ~{option}.{name} removes a default"
            raise ConfigError(f"unknown option {option}.{name}{near}; {has}; {way}")
    for field in fields(cast(Any, kind)):
        required = field.init and field.default is field.default_factory is MISSING
        if required and field.name not in values:
            raise ConfigError(f"{option}.{field.name}: is missing; set it")
    found = {name: checked(f"{option}.{name}", known[name], values[name]) for name in values}
    try:
        return kind(**found)
    except ValidationError as error:
        raise option_error(option, error) from error


def checked(option: str, annotation: Any, value: object) -> Any:
    """Convert ``value`` to the annotated type; a bool is no number. Raises as ``typed``."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return typed(option, annotation, value)
    try:
        result = _adapter(annotation).validate_python(value)
    except ValidationError as error:
        if isinstance(value, Mapping | list | tuple):
            raise option_error(option, error) from error
        first, *more = map(rule, error.errors(include_url=False))  # of each kind that is allowed
        rules = " or ".join([first, *(each.removeprefix("must be ") for each in more)])
        raise ConfigError(f"{option}={written(value)}: {rules}") from error
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ConfigError(f"{option}={written(value)}: must be a number")
    return result


def returned(value: object, kind: type[T], method: str) -> T:
    """Return what a plug-in's ``method`` returned. Raises ``ConfigError`` unless it is a
    ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(f"{method} returned {type(value).__name__}, expected {kind.__name__}")
    return value


def check_fields(option: str, built: object) -> None:
    """Check and convert the fields of a dataclass object, as ``typed`` does for options."""
    for name, annotation in _types(cast(Hashable, type(built))).items():
        value = checked(f"{option}.{name}", annotation, getattr(built, name))
        object.__setattr__(built, name, value)  # it may be frozen


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_LAX)


def rule(fault: Mapping[str, Any]) -> str:
    """Return the rule that one of ``ValidationError.errors()`` breaks, as ``must be above 0``."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"must be one of {choices}{nearest(str(fault['input']), choices.split(', '))}"
    template = next((text for name, text in _RULES.items() if kind.startswith(name)), None)
    return one_line(template.format(**context) if template else fault["msg"])


def fault_of(error: BaseException) -> str:
    """Return the first fault with its place: ``segments[0].rows: must be above 0, not -3``; of an
    error that is not pydantic's, its message."""
    if not isinstance(error, ValidationError):
        return one_line(error)
    if (count := error.error_count()) > _MOST_FAULTS:
        return f"{count:,} values are invalid"
    first = error.errors(include_url=False)[0]
    place, found = one_line(dotted(first["loc"])), first["input"]
    if not place:  # what was found is the whole text, as of invalid JSON
        return rule(first)
    if first["type"] == "missing":
        return f"{place} is missing"
    shown = f", not {one_line(repr(found))}" if isinstance(found, str | float | int) else ""
    return f"{place}: {rule(first)}{shown}"


def from_json(
    kind: TypeAdapter[T], file: Path, content: str | bytes, what: str, way_out: str = ""
) -> T:
    """Return the validated ``content`` of a JSON file.

    Raises ``ConfigError`` with ``what`` the file should be, the first broken rule, and ``way_out``.
    """
    try:
        return kind.validate_json(content)
    except (ValidationError, ConfigError) as error:  # the second one by a class of ours
        raise ConfigError(f"{file}: not {what} ({fault_of(error)}){way_out}") from error


def dotted(loc: Iterable[str | int]) -> str:
    """Return a place as text: ``clusters[0].name`` for ``("clusters", 0, "name")``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc).lstrip(".")


def option_error(option: str, errors: ValidationError) -> ConfigError:
    """Return the first fault of a group of options as ``ConfigError``.

    Its message is, for example, ``cluster.num_devices=0: must be at least 1``.
    """
    fault = errors.errors(include_url=False)[0]
    where = dotted((option, *fault["loc"]))
    if fault["type"] == "unexpected_keyword_argument":
        return ConfigError(f"unknown option {where}")
    if fault["type"] == "missing":
        return ConfigError(f"{where}: {rule(fault)}")
    return ConfigError(f"{where}={written(fault['input'])}: {rule(fault)}")
