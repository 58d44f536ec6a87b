"""Runs that differ by nothing but the seed, and what sets them apart from others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe.cli.report.reading import Run
from collapipe.errors import ConfigError

_SEED, _VERSION = "seed", "version"
_KINDS = ("_target_", "name")  # the options of a group that say which of its files was chosen
_ABSENT = object()


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, by seed; ``name`` says what is different elsewhere."""

    name: str
    runs: Mapping[int, Run]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order in which they were given.

    Raises ``ConfigError`` where two runs have the same configuration, version and seed.
    """
    flats = [{**_flat(run.tree), _VERSION: run.version} for run in runs]
    apart = [key for key in _keys(flats) if key != _SEED and _differs(key, flats)]
    found: dict[tuple[object, ...], dict[int, Run]] = {}
    names: dict[tuple[object, ...], str] = {}
    for run, flat in zip(runs, flats, strict=True):
        key = tuple(str(flat.get(option, _ABSENT)) for option in apart)
        same = found.setdefault(key, {})
        if run.seed in same:
            raise ConfigError(
                f"{run.folder}: has the configuration and seed of {same[run.seed].folder}; "
                "name one of the two"
            )
        same[run.seed] = run
        names.setdefault(key, _name(flat, apart, flats))
    return [Group(names[key], same) for key, same in found.items()]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` → ``{"a.b": 1}``."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _keys(flats: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(key for flat in flats for key in flat))


def _differs(key: str, flats: Sequence[Mapping[str, object]]) -> bool:
    return any(flat.get(key, _ABSENT) != flats[0].get(key, _ABSENT) for flat in flats)


def _name(
    flat: Mapping[str, object], apart: Sequence[str], flats: Sequence[Mapping[str, object]]
) -> str:
    """Such as ``strategy=Dssra strategy.drift_weight=0.1``.

    Of a group of options from another file only that file's kind is told, and what differs among
    runs that have the same kind.
    """
    parts = []
    for key in apart:
        section, _, last = key.rpartition(".")
        alike = [other for other in flats if _kind(other, section) == _kind(flat, section)]
        if last in _KINDS:
            parts.append(f"{section}={_short(key, flat, flats)}")
        elif key in flat and _differs(key, alike):
            parts.append(f"{key}={flat[key]}")
    return " ".join(dict.fromkeys(parts)) or "all runs"


def _kind(flat: Mapping[str, object], section: str) -> tuple[object, ...]:
    return tuple(flat.get(f"{section}.{key}") for key in _KINDS)


def _short(key: str, flat: Mapping[str, object], flats: Sequence[Mapping[str, object]]) -> str:
    """The last word of a dotted name, unless two names end with it."""
    full = str(flat.get(key))
    endings = {str(other.get(key)).rpartition(".")[2] for other in flats}
    names = {str(other.get(key)) for other in flats}
    return full.rpartition(".")[2] if len(endings) == len(names) else full
