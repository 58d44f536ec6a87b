"""Plug-ins: ``_target_`` names a class, built-in or a user's own, the other keys its fields."""

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_class

from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.validation import typed

PLUGIN_FOLDER = "COLLAPIPE_PLUGINS"  # the current folder, for processes that have another one
# Of a class that is not found it logs what its error says, which becomes ours.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)


def build(option: str, node: Any) -> Any:
    """Instantiate a plug-in from its options, typed where its class is a dataclass."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{option}: has no _target_; choose one of the files in conf/{option}/")
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    target = class_of(option, node["_target_"])
    if not is_dataclass(target) and not (option == "data.partitioner" and is_partitioner(target)):
        raise ConfigError(f"{option}._target_={node['_target_']}: must be a dataclass")
    try:
        return typed(option, target, arguments) if is_dataclass(target) else target(**arguments)
    except CollaPipeError:
        raise
    except Exception as error:  # the class may be a user's own
        raise ConfigError(
            f"{option}: {node['_target_']} refused its options: {one_line(error)}"
        ) from error


def is_partitioner(target: type[Any]) -> bool:
    """Whether it takes rows apart as those of Flower Datasets do."""
    from flwr_datasets.partitioner import Partitioner  # imports datasets, which takes seconds

    return issubclass(target, Partitioner)


def class_of(option: str, target: object) -> type[Any]:
    """The class that ``_target_`` names; its module is imported, the current folder's too.

    Raises ``ConfigError``.
    """
    try:
        _import_package(str(target).partition(".")[0])
        return get_class(str(target))
    except (ImportError, ValueError, AttributeError, SyntaxError, HydraException) as error:
        raise ConfigError(f"{option}._target_={target}: {one_line(error)}") from error


def _import_package(name: str) -> None:
    """Import the current folder's ``name`` where Python's own path has none.

    The folder stands on the path meanwhile only: it may be one that somebody else has filled.
    """
    if not name.isidentifier() or name in sys.modules or find_spec(name) is not None:
        return
    folder = os.environ.get(PLUGIN_FOLDER, str(Path.cwd()))
    sys.path.append(folder)
    try:
        importlib.import_module(name)
    finally:
        sys.path.remove(folder)
