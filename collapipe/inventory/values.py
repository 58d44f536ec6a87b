"""Permitted values of a file's keys, in SI units and decibels, and mappings of such values."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from collapipe.credentials.addresses import host_and_port
from collapipe.errors import ConfigError, is_printable
from collapipe.inventory.yaml_file import Scalar, UnknownKeyError
from collapipe.process.folders import in_home
from collapipe.state.limits import MOST_DECIBELS
from collapipe.validation import nearest

MOST_BLOCKS = 10_000
_LEAST, _MOST = 1e-18, 1e18  # of figures in SI units
# In YAML 1.1 1e8 is a text. Forms that only Python or only YAML reads as numbers are refused.
_NUMBER = re.compile(r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def _number(given: object) -> float:
    if not isinstance(given, Scalar):
        kind = "a list" if isinstance(given, list) else "keys with values"
        raise ValueError(f"must be a number, not {kind}")
    if given.lower().lstrip("+-").lstrip(".") in ("inf", "nan", "infinity"):
        raise ValueError("must be finite; write a number")
    if not _NUMBER.fullmatch(given):
        raise ValueError("must be a number; such as 64 or 4.0e11, no unit")
    if given.is_quoted:
        raise ValueError("must be a number; remove the quotes")
    value = float(given)
    if value and not _LEAST <= abs(value) <= _MOST:
        raise ValueError("too far from 1 for SI units; check it")
    return value


def _decibels(value: float) -> float:
    if abs(value) > MOST_DECIBELS:
        most = f"{MOST_DECIBELS} dB"
        raise ValueError(f"must be from -{most} to {most}; are these decibels?")
    return value


def _text(given: object) -> str:
    if not isinstance(given, str) or not given.strip() or not is_printable(given):
        raise ValueError("must be a text of one line")
    if isinstance(given, Scalar) and not given.is_quoted and given.lower() in ("~", "null"):
        raise ValueError("must be a text")  # YAML's null, which the file's error calls empty
    return str(given)


def _place(given: str) -> str:
    try:
        return in_home(given)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _address(given: str) -> str:
    try:
        host_and_port(given)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(f"address {given!r}: ")) from error
    return given


def _recompute(given: object) -> object:
    if given not in ("true", "false", "auto"):
        raise ValueError("must be true, false or auto")
    return given if given == "auto" else given == "true"


Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Decibels = Annotated[Number, AfterValidator(_decibels)]
Whole = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Blocks = Annotated[Whole, Field(le=MOST_BLOCKS)]
Samples = Annotated[Whole, Field(le=10**9)]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, Field(max_length=64), BeforeValidator(_text)]
Address = Annotated[Text, AfterValidator(_address)]
Place = Annotated[Text, AfterValidator(_place)]  # a file or folder, relative to this file's folder
Recompute = Annotated[bool | Literal["auto"], BeforeValidator(_recompute)]


class Section(BaseModel):
    """A mapping of the file."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        known = cls.model_fields
        if isinstance(values, dict):
            for key in values:
                if key not in known:
                    raise UnknownKeyError((key,), f"unknown key{nearest(key, known)}")
        return values
