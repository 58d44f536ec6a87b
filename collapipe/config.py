"""Hydra's configuration tree → typed settings, once. The only file that knows Hydra."""

import difflib
import functools
import math
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from collapipe.errors import CollaPipeError, ConfigError
from collapipe.models.split import ModelSpec
from collapipe.presets import ClusterPreset
from collapipe.settings import (
    DataSettings,
    DecoderSettings,
    FederationSettings,
    FrameworkSettings,
    LinkSettings,
    OptimizerSettings,
    PipelineSettings,
    RuntimeSettings,
    ServerOptimizerSettings,
)
from collapipe.tasks.task import Task

CONF = Path(__file__).parents[1] / "conf"
_PLUGINS = ("strategy.", "task.", "model.", "cluster.", "channel.", "data.partitioner.")
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
T = TypeVar("T")
_composing = threading.Lock()  # Hydra keeps its state in a process-wide singleton


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: plug-ins may be anything
class Settings:
    """Everything that a run is configured by.

    ``task`` and ``model`` are the chosen plug-ins; ``partitioner``, ``strategy``, ``cluster`` and
    ``channel`` are built by who needs them, see ``build``. ``tree`` is the resolved configuration
    as it is saved.
    """

    seed: int
    batch_size: int
    data: DataSettings
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    federation: FederationSettings
    server_optimizer: ServerOptimizerSettings
    decoder: DecoderSettings
    link: LinkSettings
    framework: FrameworkSettings
    runtime: RuntimeSettings
    task: Task
    model: ModelSpec
    tree: Mapping[str, Any]
    run_dir: str

    @property
    def server_has_heads(self) -> bool:
        """Whether units send activations to the server, which trains the head on them."""
        return self.framework.name == "collapipe" and self.decoder.mode != "control_unit"

    def build(self, option: str) -> Any:
        """The object that a plug-in option such as ``strategy`` or ``data.partitioner`` names."""
        return build(option, OmegaConf.select(OmegaConf.create(dict(self.tree)), option))


SECTIONS = {
    field.name: field.type
    for field in fields(Settings)
    if isinstance(field.type, type) and is_dataclass(field.type)
}


def load(run_config: Mapping[str, Any]) -> Settings:
    """Settings of a Flower app: its run configuration has all overrides in one string."""
    text = str(run_config.get("overrides", ""))
    try:
        overrides = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides={text!r}: cannot be split into options ({error})") from error
    return load_overrides(overrides)


def join(overrides: Sequence[str]) -> str:
    """The string that ``load`` reads."""
    return shlex.join(overrides)


def load_overrides(overrides: Sequence[str]) -> Settings:
    """Compose ``conf/`` with Hydra overrides and check every value.

    Raises ``ConfigError``: one line with the option, its value, and the way out.
    """
    return _load(tuple(overrides))


def load_saved(file: Path, trusted: Sequence[str] = ()) -> Settings:
    """Settings from a run's ``config.yaml``, which may be somebody else's.

    Its plug-ins are imported, so they must be dataclasses of CollaPipe itself or of a ``trusted``
    package; and it is resolved already, so nothing in it is looked up in the environment. Raises
    ``ConfigError`` otherwise.
    """
    text = file.read_text(encoding="utf-8")
    try:
        aliases = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        if "${" in text or aliases:  # which could look up a secret, or grow without bounds
            raise ConfigError(f"{file}: has references, which a saved configuration has not")
        tree = OmegaConf.create(text)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not a saved configuration ({_line(error)})") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file}: not a saved configuration")
    for option in ("task", "model"):
        _check_trusted(option, OmegaConf.select(tree, f"{option}._target_"), trusted)
    return _settings(tree, str(file.parent))


def _check_trusted(option: str, target: object, trusted: Sequence[str]) -> None:
    packages = ("collapipe", *trusted)
    name = str(target)
    if name.partition(".")[0] in packages:  # before anything is imported
        with suppress(ImportError, ValueError, AttributeError, HydraException):
            found = get_class(name)
            # A name may lead through a module of ours to one that it imported.
            if is_dataclass(found) and found.__module__.partition(".")[0] in packages:
                return
    raise ConfigError(
        f"{option}._target_={name}: a saved run may name dataclasses of {', '.join(packages)} "
        f"only; if you trust it, add --trust {name.partition('.')[0]}"
    )


@functools.lru_cache(maxsize=8)
def _load(overrides: tuple[str, ...]) -> Settings:
    tree = _compose(overrides)
    run_dir = str(tree.hydra.run.dir)
    kept = [str(key) for key in tree if key != "hydra"]
    settings = _settings(OmegaConf.masked_copy(tree, kept), run_dir)
    _check_segments(settings, settings.build("cluster"))
    settings.build("channel")
    root = settings.data.root
    if root is not None and not Path(root).is_dir():
        raise ConfigError(f"data.root={root}: no such folder (seen from {Path.cwd()})")
    return settings


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination of ``a=1,2`` and ``b=range(3)``."""
    jobs: list[list[str]] = [[]]
    for override in _parse(overrides):
        if override.is_sweep_override():
            key = override.get_key_element()
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            values = [cast(str, override.input_line)]
        jobs = [[*job, value] for job in jobs for value in values]
    return jobs


def sweep_dir(overrides: Sequence[str]) -> str:
    """Folder of a sweep's jobs."""
    settled = [override for override in overrides if override.startswith("hydra.")]
    return str(_compose(settled).hydra.sweep.dir)


def build(option: str, node: Any) -> Any:
    """Instantiate a plug-in: ``_target_`` is a class, the other keys its typed fields."""
    if not isinstance(node, Mapping | DictConfig) or "_target_" not in node:
        raise ConfigError(f"{option}: has no _target_; choose one of the files in conf/{option}/")
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    try:
        target = get_class(node["_target_"])
    except (ImportError, ValueError, AttributeError, HydraException) as error:
        raise ConfigError(f"{option}._target_={node['_target_']}: {_line(error)}") from error
    try:
        return _typed(option, target, arguments) if is_dataclass(target) else target(**arguments)
    except CollaPipeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{option}: {node['_target_']} refused its options: {_line(error)}"
        ) from error


def _settings(tree: DictConfig, run_dir: str) -> Settings:
    try:
        resolved = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(_line(error)) from error
    data = {key: value for key, value in resolved["data"].items() if key != "partitioner"}
    sections: dict[str, Any] = {
        name: _typed(name, kind, data if name == "data" else resolved[name])
        for name, kind in SECTIONS.items()
    }
    settings = Settings(
        **sections,
        seed=_whole(resolved, "seed", 0),
        batch_size=_whole(resolved, "batch_size", 1),
        task=build("task", resolved["task"]),
        model=build("model", resolved["model"]),
        tree=resolved,
        run_dir=run_dir,
    )
    _check_together(settings)
    return settings


def quoted(value: object) -> str:
    """A value as an override may hold it, whatever characters it has."""
    escaped = str(value).replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


def _whole(tree: Mapping[str, Any], option: str, least: int) -> int:
    value = tree[option]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(
            f"{option}={value}: must be a whole number of at least {least}, below 2⁶³"
        )
    return value


def _check_together(settings: Settings) -> None:
    pipeline = settings.pipeline
    if pipeline.num_micro_batches > settings.batch_size:
        raise ConfigError(
            f"pipeline.num_micro_batches={pipeline.num_micro_batches}: more than "
            f"batch_size={settings.batch_size}; a micro-batch holds at least one sample"
        )


def _check_segments(settings: Settings, cluster: ClusterPreset) -> None:
    segments = settings.pipeline.num_segments
    if segments is None:
        return
    if segments > cluster.num_devices:
        raise ConfigError(
            f"pipeline.num_segments={segments}: more than cluster.num_devices="
            f"{cluster.num_devices}; a device holds one segment at most"
        )
    if segments > settings.model.num_blocks:
        raise ConfigError(
            f"pipeline.num_segments={segments}: more than model.num_blocks="
            f"{settings.model.num_blocks}; a segment holds at least one block"
        )


def _typed(option: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """``values`` as the dataclass ``kind``; types are converted, unknown names refused."""
    known = [field.name for field in fields(cast(Any, kind))]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown option {option}.{name}{_nearest(str(name), known)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), dict(values))
        return cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        where = f"{option}.{error.full_key}" if error.full_key else option
        if "is not a ListConfig" in str(error.msg):
            value = values[str(error.full_key)]
            raise ConfigError(f"{where}={value}: must be a list, [A, B]") from error
        raise ConfigError(f"{where}: {str(error.msg or error).splitlines()[0]}") from error


def _compose(overrides: Sequence[str]) -> DictConfig:
    parsed = _parse(overrides)
    with _composing:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            groups = [str(o.input_line) for o in parsed if o.key_or_group.split("@")[0] in GROUPS]
            for override in parsed:
                _check_group(override)
            known = _flat(_compose_or_explain(groups))
            for override in parsed:
                _check_key(override, known)
            return _compose_or_explain(overrides)


def _compose_or_explain(overrides: Sequence[str]) -> DictConfig:
    try:
        return compose("config", list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{_line(error)} (overrides: {join(overrides)})") from error


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"not an override KEY=VALUE: {_line(error)}") from error


def _check_group(override: Override) -> None:
    group, choice = override.key_or_group, override.value()
    if group not in GROUPS or not isinstance(choice, str):
        return
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    if choice not in choices:
        raise ConfigError(
            f"{group}={choice}: there is no conf/{group}/{choice}.yaml"
            f"{_nearest(choice, choices)}; known: {', '.join(choices) or 'none'}"
        )


def _check_key(override: Override, known: set[str]) -> None:
    key = override.key_or_group
    if override.is_add() or override.is_force_add() or key in GROUPS or key in known:
        value = override.value()
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{key}=nan: must be a number")
        return
    if key.startswith("hydra."):
        return
    raise ConfigError(
        f"unknown option {key}{_nearest(key, sorted(known | set(GROUPS)))}"
        + (f"; an option of your own class is added: +{key}=…" if key.startswith(_PLUGINS) else "")
    )


def _flat(tree: DictConfig) -> set[str]:
    """Dotted names of all values and sections."""
    names: set[str] = set()

    def visit(node: Any, prefix: str) -> None:
        for key, value in node.items_ex(resolve=False) if OmegaConf.is_dict(node) else ():
            name = f"{prefix}{key}"
            if name != "hydra":
                names.add(name)
                visit(value, f"{name}.")

    visit(tree, "")
    return names


def _nearest(name: str, known: Sequence[str]) -> str:
    """``; nearest: X``, also for a right last name under a wrong group."""
    last = name.rsplit(".", 1)[-1]
    same = sorted((option for option in known if option.rsplit(".", 1)[-1] == last), key=len)
    options = [option for option in known if not name.startswith(f"{option}.")]
    near = same[:1] or difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"; nearest: {near[0]}" if near else ""


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
