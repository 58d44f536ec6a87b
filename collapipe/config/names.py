"""Which options and choices there are, and what a wrong name may have meant."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from collapipe.errors import ConfigError
from collapipe.validation import nearest

CONF = Path(__file__).parents[2] / "conf"
GROUPS = frozenset(path.name for path in CONF.iterdir() if path.is_dir())
_OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir")  # its other options would have no effect
_PLUGINS = (
    "strategy.",
    "task.",
    "model.",
    "cluster.",
    "channel.",
    "environment.",
    "data.partitioner.",
)


def known_names(options: Mapping[str, Any]) -> frozenset[str]:
    """Dotted names of all values, sections and groups of a configuration."""
    return frozenset({*names_in(options), *GROUPS, *_OF_HYDRA})


def check_name(name: str, known: AbstractSet[str]) -> None:
    """Raise ``ConfigError`` for an option that is not ``known``."""
    if name not in known:
        adding = f"; an option of your own class is added: +{name}=…"
        raise ConfigError(
            f"unknown option {name}{nearest(name, sorted(known))}"
            + (adding if name.startswith(_PLUGINS) else "")
        )


def check_choice(group: str, choice: str) -> None:
    """Raise ``ConfigError`` where ``conf/`` has no such file."""
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    if choice not in choices:
        raise ConfigError(
            f"{group}={choice}: there is no conf/{group}/{choice}.yaml"
            f"{nearest(choice, choices)}; known: {', '.join(choices)}"
        )


def names_in(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of all values and mappings in a tree."""
    if not isinstance(node, Mapping):
        return []
    return [
        name
        for key, value in node.items()
        for name in (f"{prefix}{key}", *names_in(value, f"{prefix}{key}."))
    ]
