"""Group runs by configuration, and name each group by the options that differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collapipe.config.resolved import flattened
from collapipe.config.trust import PLUGINS
from collapipe.errors import ConfigError
from collapipe.runs.reading import Run

_SEED, _VERSION = "seed", "version"
_FIRST = ("framework", "strategy")  # in names of configurations
_MOST_TEXT = 60  # characters of an option's value
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one configuration, by seed.

    ``mark`` (A, B, C …) is its short label; ``name`` lists the options that differ from other
    groups.
    """

    mark: str
    name: str
    runs: dict[int, Run]

    @property
    def title(self) -> str:
        """Title for a table, such as ``A strategy=dssra``."""
        return f"{self.mark} {_text(self.name)}"


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group the runs in the order in which they were given.

    Raises ``ConfigError`` if two runs have the same configuration, version and seed.
    """
    flats = [{**flattened(run.tree), _VERSION: run.version} for run in runs]
    choices = [_choices(run, flat) for run, flat in zip(runs, flats, strict=True)]
    keys = dict.fromkeys(key for flat in flats for key in flat if key != _SEED)
    apart = sorted((key for key in keys if _differs(key, flats)), key=_importance)
    groups: dict[tuple[object, ...], Group] = {}
    for number, (run, flat) in enumerate(zip(runs, flats, strict=True)):
        key = tuple(str(flat.get(option, _ABSENT)) for option in apart)
        if key not in groups:
            groups[key] = Group(_mark(len(groups)), _name(number, apart, flats, choices), {})
        same = groups[key].runs
        if run.seed in same:
            raise ConfigError(
                f"{run.folder}: has the configuration and seed of {same[run.seed].folder}; "
                "name one of the two"
            )
        same[run.seed] = run
    return [*groups.values()]


def _mark(number: int) -> str:
    """Return a mark by number: A, B … Z, AA, AB …"""
    before = _mark(number // 26 - 1) if number >= 26 else ""
    return before + chr(ord("A") + number % 26)


def _importance(key: str) -> int:
    section = key.partition(".")[0]
    return _FIRST.index(section) if section in _FIRST else len(_FIRST)


def _differs(key: str, trees: Sequence[Mapping[str, object]]) -> bool:
    return any(tree.get(key, _ABSENT) != trees[0].get(key, _ABSENT) for tree in trees)


def _choices(run: Run, flat: Mapping[str, object]) -> dict[str, str]:
    """Return the chosen file of each group, or the class if it is the user's own."""
    targets = {group: str(flat.get(f"{group}._target_", "")) for group in run.choices}
    own = {g: name for g, name in targets.items() if name.partition(".")[0] not in ("", *PLUGINS)}
    return run.choices | own


def _name(
    number: int,
    apart: Sequence[str],
    flats: Sequence[Mapping[str, object]],
    choices: Sequence[Mapping[str, object]],
) -> str:
    """Return a group's name, such as ``strategy=dssra strategy.drift_weight=0.1``. It has the
    choices that differ, and options that differ among runs with equal choices."""
    flat, chosen, parts = flats[number], choices[number], []
    for key in apart:
        differing = [group for group in key.split(".")[:-1] if _differs(group, choices)]
        parts += [f"{group}={_text(chosen.get(group))}" for group in differing]
        same_choices = [
            other
            for other, choice in zip(flats, choices, strict=True)
            if all(choice.get(group) == chosen.get(group) for group in differing)
        ]
        if key in flat and _differs(key, same_choices):
            parts.append(f"{key}={_text(flat[key])}")
    return " ".join(dict.fromkeys(parts)) or "all runs"


def _text(value: object) -> str:
    """Return a value in the configuration's form, shortened for a table."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"
