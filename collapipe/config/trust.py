"""Read a run's saved configuration, which is untrusted: limit its size and the classes it names."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml

from collapipe import __version__
from collapipe.config.resolved import check_values, targets, value_at
from collapipe.config.settings import class_of, is_partitioner
from collapipe.errors import ConfigError, cause_of, one_line

PLUGINS = ("collapipe", "optim", "server_app")  # packages whose plug-ins are trusted
_PARTITIONERS = "flwr_datasets.partitioner."
_MOST_TEXT, _MOST_DEPTH = 100_000, 50  # a real one has a few thousand characters, depth 5


def read_saved(file: Path, trusted: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return the options in a run's ``config.yaml``, after the version that wrote them.

    Its task and model will be built, and no other plug-in. They must be dataclasses of CollaPipe or
    of a ``trusted`` package. References are refused, because they could read the environment.
    Raises ``ConfigError`` if the file is invalid.
    """
    if isinstance(trusted, str):  # Python code would trust packages named by its letters
        raise ConfigError(f"trusted={trusted!r}: must be a list of texts: [{trusted!r}]")
    text, tree = read_tree(file)
    for token in yaml.scan(text):  # yaml.scan has decoded escapes; a reference could read a secret
        if isinstance(token, yaml.ScalarToken) and "${" in token.value:
            raise ConfigError(f"{file}: has references, which a saved configuration has not")
    for option in ("task", "model"):
        target = value_at(tree, f"{option}._target_")
        if target is None:
            raise ConfigError(f"{file}: not a saved configuration ({option}._target_ is missing)")
        _check_trusted(option, str(target), ("collapipe", *trusted))
    return version_of(text), tree


def read_tree(file: Path) -> tuple[str, dict[Any, Any]]:
    """Return the text of a run's ``config.yaml``, and its values with unresolved references.

    Raises ``ConfigError`` if the file is invalid or could take unbounded time or memory.
    """
    from omegaconf import OmegaConf  # takes half a second
    from omegaconf.errors import OmegaConfBaseException

    text = read_limited(file)
    check_text(file, text)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{file}: not a saved configuration ({one_line(error)})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: not a saved configuration")
    check_values(f"{file}: ", tree)
    return text, tree


def version_of(text: str) -> str:
    """Return the version of CollaPipe that wrote the text of a ``config.yaml``, or ``unknown``."""
    written = text.partition("\n")[0].partition("# CollaPipe ")[2]
    return one_line(written) or "unknown"


def read_limited(file: Path) -> str:
    """Return the text of a small file. Raises ``ConfigError`` if it is unreadable or too long."""
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({cause_of(error)})") from error
    if len(text) > _MOST_TEXT:
        raise ConfigError(f"{file}: not as a run writes it (more than {_MOST_TEXT:,} characters)")
    return text


def check_text(file: Path, text: str) -> None:
    """Raise ``ConfigError`` for YAML with aliases, tags or deep nesting.

    They could make a parser take unbounded time or memory, or make objects of other types. A saved
    configuration never has them.
    """
    depth = 0
    try:
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{file}: has references, which a saved configuration has not")
            if getattr(event, "tag", None):
                raise ConfigError(f"{file}: has tags (!), which a saved configuration has not")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise ConfigError(f"{file}: not a saved configuration (nested too deeply)")
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not a saved configuration ({one_line(error)})") from error


def check_plugins(tree: Mapping[str, Any], trusted: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` if untrusted options name a plug-in of an unknown package.

    Plug-ins of CollaPipe, of Flower Datasets and of ``trusted`` packages are allowed. Other
    packages are not imported.
    """
    for option, target in targets(tree):
        if not _is_partitioner(target):
            _check_trusted(option, target, (*PLUGINS, *trusted))


def _is_partitioner(target: str) -> bool:
    """Whether ``target`` is a partitioner of flwr-datasets, which only splits rows."""
    found = _found(target) if target.startswith(_PARTITIONERS) else None
    return bool(found and is_partitioner(found) and found.__module__.startswith(_PARTITIONERS))


def _check_trusted(option: str, target: str, packages: Sequence[str]) -> None:
    package = target.partition(".")[0]
    found = _found(target) if package in packages else None
    # A module of a trusted package may have imported the class from elsewhere.
    if is_dataclass(found) and found.__module__.partition(".")[0] in packages:
        return
    if found is None and package in packages and package not in PLUGINS:
        class_of(option, target)  # its error says why the user's package cannot be imported
    way_out = f"if you trust it, add --trust {package} (in Python: trusted=[{package!r}])"
    if package in PLUGINS:
        way_out = f"{package} {__version__} has none of this name"
    raise ConfigError(
        f"{option}._target_={target}: a saved run may name dataclasses of {', '.join(packages)} "
        f"only; {way_out}"
    )


def _found(target: str) -> type[Any] | None:
    """Import and return the class of this name; None if it cannot be imported."""
    with suppress(ConfigError):
        return class_of("", target)
    return None
