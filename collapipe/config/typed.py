"""Plain values → the dataclasses that options are typed by, built-in or a user's own."""

import functools
import logging
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from collapipe.config.names import nearest
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.validation import option_error

T = TypeVar("T")
# Of a class that is not found it logs what its error says, which becomes ours.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)


def build(option: str, node: Any) -> Any:
    """Instantiate a plug-in: ``_target_`` is a class, the other keys its typed fields."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{option}: has no _target_; choose one of the files in conf/{option}/")
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    target = class_of(option, node["_target_"])
    try:
        return typed(option, target, arguments) if is_dataclass(target) else target(**arguments)
    except CollaPipeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{option}: {node['_target_']} refused its options: {one_line(error)}"
        ) from error


def class_of(option: str, target: str) -> type[Any]:
    """The class that ``_target_`` names; its module is imported. Raises ``ConfigError``."""
    try:
        return get_class(target)
    except (ImportError, ValueError, AttributeError, HydraException) as error:
        raise ConfigError(f"{option}._target_={target}: {one_line(error)}") from error


def typed(option: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """``values`` as the dataclass ``kind``; types are converted, unknown names refused."""
    known = [field.name for field in fields(cast(Any, kind))]
    for name in values:
        if name not in known:
            near = nearest(str(name), known)
            has = f"; {kind.__name__} has {', '.join(known) or 'no options'}"
            raise ConfigError(f"unknown option {option}.{name}{near}{has}")
    try:
        merged = OmegaConf.merge(_schema(cast(Hashable, kind)), dict(values))
        return cast(T, OmegaConf.to_object(merged))
    except ValidationError as error:
        raise option_error(option, error) from error
    except OmegaConfBaseException as error:
        where = f"{option}.{error.full_key}" if error.full_key else option
        if "is not a ListConfig" in str(error.msg):
            value = values[str(error.full_key)]
            raise ConfigError(f"{where}={value}: must be a list, [A, B]") from error
        raise ConfigError(f"{where}: {str(error.msg or error).splitlines()[0]}") from error


@functools.cache  # who merges into it copies it first
def _schema(kind: Any) -> Any:
    """The fields and types of a dataclass; OmegaConf locks frozen ones inside it before they are
    filled."""
    schema = OmegaConf.structured(kind)
    for name in schema:
        node = schema._get_node(name)
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)
    return schema
