"""Hydra's configuration tree → typed settings, once. The only file that knows Hydra."""

import copy
import difflib
import functools
import math
import re
import shlex
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from collapipe.errors import CollaPipeError, ConfigError
from collapipe.models.cut import cut_at
from collapipe.models.lora import AdapterSettings
from collapipe.models.split import ModelSpec
from collapipe.presets import ClusterPreset
from collapipe.settings import (
    CompressionSettings,
    DataSettings,
    DecoderSettings,
    FederationSettings,
    FrameworkSettings,
    LinkSettings,
    OptimizerSettings,
    PipelineSettings,
    RuntimeSettings,
    ServerOptimizerSettings,
    TrackingSettings,
)
from collapipe.tasks.task import Task

CONF = Path(__file__).parents[1] / "conf"
_OWN = ("collapipe", "optim", "server_app")  # packages whose plug-ins are trusted
_PARTITIONERS = "flwr_datasets.partitioner."
_PLUGINS = (
    "strategy.",
    "task.",
    "model.",
    "cluster.",
    "channel.",
    "environment.",
    "data.partitioner.",
)
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
T = TypeVar("T")
_composing = threading.Lock()  # Hydra keeps its state in a process-wide singleton


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: plug-ins may be anything
class Settings:
    """Everything that a run is configured by.

    ``task`` and ``model`` are the chosen plug-ins; ``partitioner``, ``strategy``, ``cluster``,
    ``channel`` and ``environment`` are built by who needs them, see ``build``. ``tree`` is
    the resolved configuration as it is saved, ``overrides`` what it was composed from.
    """

    seed: int
    batch_size: int
    data: DataSettings
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    federation: FederationSettings
    server_optimizer: ServerOptimizerSettings
    decoder: DecoderSettings
    compression: CompressionSettings
    adapter: AdapterSettings
    link: LinkSettings
    framework: FrameworkSettings
    runtime: RuntimeSettings
    tracking: TrackingSettings
    task: Task
    model: ModelSpec
    tree: Mapping[str, Any]
    run_dir: str
    overrides: tuple[str, ...] = ()

    @property
    def server_has_heads(self) -> bool:
        """Whether units send activations to the server, which trains the head on them."""
        return not self.framework.unsplit and self.decoder.mode != "control_unit"

    def build(self, option: str) -> Any:
        """The object that a plug-in option such as ``strategy`` or ``data.partitioner`` names."""
        node: Any = self.tree
        for key in option.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return build(option, node)


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
    try:
        text = file.read_text(encoding="utf-8")
        if any(map(_refers, yaml.scan(text))):
            raise ConfigError(f"{file}: has references, which a saved configuration has not")
        tree = OmegaConf.create(text)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a saved configuration ({_line(error)})") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file}: not a saved configuration")
    for option in ("task", "model"):
        target = OmegaConf.select(tree, f"{option}._target_")
        _check_trusted(option, target, ("collapipe", *trusted))
    return _settings(tree, str(file.parent))


def check_overrides(overrides: Sequence[str], trusted: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` where overrides, which may be somebody else's, name a plug-in that is
    neither CollaPipe's nor a ``trusted`` package's; nothing is imported for them."""
    tree = _compose(overrides)
    with open_dict(tree):
        del tree["hydra"]
    try:
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_line(error)) from error
    for option, target in _targets(resolved):
        if not _is_partitioner(target):
            _check_trusted(option, target, (*_OWN, *trusted))


def merged(overrides: Sequence[str], later: Sequence[str]) -> list[str]:
    """``overrides`` without those that ``later`` ones replace, then these."""
    keys = {override.key_or_group for override in _parse(later)}
    kept = [each for each in _parse(overrides) if each.key_or_group not in keys]
    return [*(str(each.input_line) for each in kept), *later]


def _targets(node: Any, option: str = "") -> Iterator[tuple[str, str]]:
    """Every ``_target_`` below, and the option that it is of."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "_target_":
                yield option, str(value)
            yield from _targets(value, f"{option}.{key}".lstrip("."))
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value, option)


def _is_partitioner(target: str) -> bool:
    """Whether it is one of flwr-datasets: plain classes, which only take rows apart."""
    if target.startswith(_PARTITIONERS):
        with suppress(ImportError, ValueError, AttributeError, HydraException):
            return bool(get_class(target).__module__.startswith(_PARTITIONERS))
    return False


def _refers(token: yaml.Token) -> bool:
    """Whether it could look up a secret, or grow without bounds; escapes are read already."""
    return isinstance(token, yaml.AliasToken) or (
        isinstance(token, yaml.ScalarToken) and "${" in token.value
    )


def _check_trusted(option: str, target: object, packages: Sequence[str]) -> None:
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
    settings.build("environment")
    settings = replace(settings, overrides=overrides)
    for option, path in settings.data.paths().items():
        there = path.is_dir() if option == "root" else path.is_file()
        if not there:
            kind = "folder" if option == "root" else "file"
            raise ConfigError(f"data.{option}={path}: no such {kind} (seen from {Path.cwd()})")
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
        resolved = cast(
            dict[str, Any], OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
        )
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value; set {error.full_key}=…") from error
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
        model=cut_at(
            sections["adapter"].on(build("model", resolved["model"])), sections["framework"].cut
        ),
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
    pipeline, task, head = settings.pipeline, settings.task, settings.model.head
    if head not in task.heads:
        raise ConfigError(
            f"task={task.name}: needs a model with a head {' or '.join(task.heads)}, this one has "
            f"{head}; {_with_head(settings, task.heads[0])}"
        )
    fadings = [settings.tree[group].get("fading") for group in ("strategy", "environment")]
    if fadings == ["rayleigh", "rayleigh"]:
        raise ConfigError(
            "strategy.fading=rayleigh with environment.fading=rayleigh: gains that fade in every "
            "round would be averaged over fading again; set one of them to none"
        )
    cut, mode = settings.framework.cut, settings.decoder.mode
    if cut is not None and mode == "control_unit":
        raise ConfigError(
            f"framework.cut={cut}: the blocks behind it are trained with the head on the server, "
            f"but decoder.mode={mode} keeps that on the units; set decoder.mode=per_cluster"
        )
    if pipeline.num_micro_batches > settings.batch_size:
        raise ConfigError(
            f"pipeline.num_micro_batches={pipeline.num_micro_batches}: more than "
            f"batch_size={settings.batch_size}; a micro-batch holds at least one sample"
        )


def _with_head(settings: Settings, head: str) -> str:
    """The way to a model with this head."""
    if "head" in settings.tree["model"]:
        return f"set model.head={head}, or another model.name"
    return "set model=huggingface and model.name=FOLDER_OR_HUB_ID, or model.family=bert or gpt2"


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
        blocks = "model.num_blocks" if settings.framework.cut is None else "framework.cut"
        raise ConfigError(
            f"pipeline.num_segments={segments}: more than {blocks}={settings.model.num_blocks}; "
            "a segment holds at least one block"
        )


def _typed(option: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """``values`` as the dataclass ``kind``; types are converted, unknown names refused."""
    known = [field.name for field in fields(cast(Any, kind))]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown option {option}.{name}{_nearest(str(name), known)}")
    try:
        merged = OmegaConf.merge(_schema(cast(Hashable, kind)), dict(values))
        return cast(T, OmegaConf.to_object(merged))
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


def _compose(overrides: Sequence[str]) -> DictConfig:
    parsed = _parse(overrides)
    for override in parsed:
        _check_group(override)
    with _composing:
        tree, known = _of_groups(tuple(str(each.input_line) for each in parsed if _chooses(each)))
        for override in parsed:
            _check_key(override, known)
        if not all(_chooses(each) or _sets(each) for each in parsed):
            return _by_hydra(overrides)
        tree = copy.deepcopy(tree)
        try:
            for override in parsed:
                if _sets(override):  # as Hydra does, in a hundredth of its time
                    OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{_line(error)} (overrides: {join(overrides)})") from error
        return tree


@functools.lru_cache(maxsize=64)
def _of_groups(choices: tuple[str, ...]) -> tuple[DictConfig, set[str]]:
    """The tree with these choices of groups alone, and the names of all its options."""
    tree = _by_hydra(choices)
    return tree, _flat(tree)


def _by_hydra(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{_line(error)} (overrides: {join(overrides)})") from error


def _chooses(override: Override) -> bool:
    """Whether it names a file of a group."""
    return override.key_or_group in GROUPS or override.key_or_group.startswith("hydra/")


def _sets(override: Override) -> bool:
    """Whether it gives one option one value, and neither adds nor deletes one."""
    plain = override.type is OverrideType.CHANGE and not override.is_sweep_override()
    return plain and override.package is None and not _chooses(override)


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
