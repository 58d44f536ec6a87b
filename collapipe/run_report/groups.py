"""Runs that differ by nothing but the seed, and what sets them apart from others."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collapipe.errors import ConfigError
from collapipe.runs.reading import Run

_SEED, _VERSION = "seed", "version"
_KINDS = ("_target_", "name")  # the options of a group that say which of its files was chosen
_FIRST = ("framework", "strategy")  # of what is told
_MOST_TEXT = 60  # characters of an option's value
_ABSENT = object()


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, by seed; ``mark``, A, B, C …, stands for it where room is scarce,
    and ``name`` says what is different elsewhere."""

    mark: str
    name: str
    runs: Mapping[int, Run]

    @property
    def title(self) -> str:
        """Such as ``A strategy=dssra``."""
        return f"{self.mark} {self.name}"


@dataclass(frozen=True, slots=True)
class _Options:
    """A run's options by their dotted names, and the files that groups of them came from."""

    flat: Mapping[str, object]
    choices: Mapping[str, str]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order in which they were given.

    Raises ``ConfigError`` where two runs have the same configuration, version and seed.
    """
    flats = [{**_flat(run.tree), _VERSION: run.version} for run in runs]
    every = [_Options(flat, run.choices) for flat, run in zip(flats, runs, strict=True)]
    apart = [key for key in _keys(flats) if key != _SEED and _differs(key, flats)]
    apart.sort(key=_importance)
    found: dict[tuple[object, ...], dict[int, Run]] = {}
    names: dict[tuple[object, ...], str] = {}
    for run, options in zip(runs, every, strict=True):
        key = tuple(str(options.flat.get(option, _ABSENT)) for option in apart)
        same = found.setdefault(key, {})
        if run.seed in same:
            raise ConfigError(
                f"{run.folder}: has the configuration and seed of {same[run.seed].folder}; "
                "name one of the two"
            )
        same[run.seed] = run
        names.setdefault(key, _name(options, apart, every))
    return [Group(_mark(n), names[key], same) for n, (key, same) in enumerate(found.items())]


def _mark(number: int) -> str:
    """A, B … Z, AA, AB …"""
    before = _mark(number // 26 - 1) if number >= 26 else ""
    return before + chr(ord("A") + number % 26)


def _importance(key: str) -> int:
    section = key.partition(".")[0]
    return _FIRST.index(section) if section in _FIRST else len(_FIRST)


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


def _name(options: _Options, apart: Sequence[str], every: Sequence[_Options]) -> str:
    """Such as ``strategy=dssra strategy.drift_weight=0.1``.

    Of a group of options from another file only that file is told, or its kind where a run's file
    is not known, and what differs among runs that have the same one.
    """
    parts = []
    flats = [each.flat for each in every]
    for key in apart:
        group, (section, _, last) = key.partition(".")[0], key.rpartition(".")
        if _apart_by_choice(group, every):
            parts.append(f"{group}={options.choices[group]}")
            alike = [o.flat for o in every if o.choices[group] == options.choices[group]]
        elif last in _KINDS:
            parts.append(f"{section}={_short(key, options.flat, flats)}")
            continue
        else:
            own = _kind(options.flat, section)
            alike = [flat for flat in flats if _kind(flat, section) == own]
        if key in options.flat and _differs(key, alike):
            parts.append(f"{key}={_text(options.flat[key])}")
    return " ".join(dict.fromkeys(parts)) or "all runs"


def _apart_by_choice(group: str, every: Sequence[_Options]) -> bool:
    """Whether each run's file of the group is known, and it is not one and the same."""
    return len({each.choices.get(group) for each in every}) > 1 and all(
        group in each.choices for each in every
    )


def _text(value: object) -> str:
    """As the configuration has it, not as Python does; no longer than a table can show."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"


def _kind(flat: Mapping[str, object], section: str) -> tuple[object, ...]:
    return tuple(flat.get(f"{section}.{key}") for key in _KINDS)


def _short(key: str, flat: Mapping[str, object], flats: Sequence[Mapping[str, object]]) -> str:
    """The last word of a dotted name, unless two names end with it."""
    full = _text(flat.get(key))
    endings = {_text(other.get(key)).rpartition(".")[2] for other in flats}
    names = {_text(other.get(key)) for other in flats}
    return full.rpartition(".")[2] if len(endings) == len(names) else full
