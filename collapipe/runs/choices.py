"""Which file of ``conf/`` each group of options came from: the name that a user typed."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_CONF = Path(__file__).parents[2] / "conf"
_EXPERIMENT = "experiment"  # a group whose files choose those of others
_OVERRIDE = re.compile(r"\+{0,2}(\w+)=(.*)", re.DOTALL)
_KINDS = ("_target_", "name")  # by one of them a file says what it is
_MOST_BYTES = 100_000


def read_choices(file: Path, tree: Mapping[str, Any]) -> dict[str, str]:
    """By group, such as ``{"environment": "mobile", "strategy": "dssra"}``, defaults included.

    ``file`` is the run's ``overrides.json``, which may be a stranger's, ``tree`` its configuration.
    Where there is no such file, or an odd one, nothing is known. A choice is left out where
    ``conf/`` has no such file, or where the configuration has another class than that file.
    """
    overrides = _overrides(file)
    if overrides is None:
        return {}
    named = dict(_named(overrides))
    picked = _defaults(_CONF / "config.yaml")
    if (experiment := named.get(_EXPERIMENT)) in _files(_EXPERIMENT):
        picked |= _defaults(_CONF / _EXPERIMENT / f"{experiment}.yaml")
    picked |= named
    return {group: choice for group, choice in picked.items() if _fits(group, choice, tree)}


def _overrides(file: Path) -> list[str] | None:
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return None
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(read, list) and all(isinstance(each, str) for each in read)
    return read if known else None


def _named(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Options without a dot, of which some are groups."""
    found = (_OVERRIDE.fullmatch(each.strip()) for each in overrides)
    return [(each[1], each[2].strip("'\" ")) for each in found if each]


def _defaults(file: Path) -> dict[str, str]:
    """What a file of ours chooses of other groups."""
    found: dict[str, str] = {}
    for entry in _read(file).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":  # another file of the same group
            found |= _defaults(file.with_name(f"{entry}.yaml"))
        elif isinstance(entry, dict):
            for group, choice in entry.items():
                found[str(group).removeprefix("override /")] = str(choice)
    return found


@cache
def _read(file: Path) -> dict[str, Any]:
    """A file of ours, once for many runs."""
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


@cache
def _files(group: str) -> frozenset[str]:
    return frozenset(path.stem for path in (_CONF / group).glob("*.yaml"))


def _fits(group: str, choice: str, tree: Mapping[str, Any]) -> bool:
    if not group.isidentifier() or choice not in _files(group):
        return False
    options = tree.get(group)
    kind, name = _kind(group, choice)
    if kind is None:
        return True
    return isinstance(options, dict) and options.get(kind) == name


def _kind(group: str, choice: str) -> tuple[str | None, object]:
    """The option that says what the file's class is, or its name, and its value."""
    whole = _read(_CONF / group / f"{choice}.yaml")
    options = whole.get(group, whole)
    for kind in _KINDS:
        if options.get(kind) is not None:
            return kind, options[kind]
    for entry in whole.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            return _kind(group, entry.partition("@")[0])
    return None, None
