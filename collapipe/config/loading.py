"""Convert a run's options to ``Settings``: each value is checked first, then their combination."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from collapipe.config.resolved import Resolved, parsed
from collapipe.config.settings import Settings, build
from collapipe.config.trust import read_saved
from collapipe.errors import ConfigError
from collapipe.sections import (
    Count,
    DataSettings,
    LoraSettings,
)
from collapipe.validation import checked, typed

_SECTIONS = {
    field.name: field.type
    for field in fields(Settings)
    if isinstance(field.type, type) and is_dataclass(field.type)
}
_NUMBERS = {"seed": Annotated[int, Field(ge=0, lt=2**63)], "batch_size": Count}
_LATER = ("server", "evaluation", "privacy")  # sections that older runs lack
_AS_YAML: dict[Any, str] = {None: "null", False: "false"}
_WORLD = ("cluster", "channel", "environment")


def load(run_config: Mapping[str, Any]) -> Settings:
    """Return the settings of a Flower ServerApp, see ``received``; the strategy is not built."""
    return load_text(received(run_config).text)


def received(run_config: Mapping[str, Any]) -> Resolved:
    """Return the options in a Flower app's run configuration.

    ``settings`` has the options that ``collapipe run`` has resolved. Without them, ``overrides``
    has Hydra overrides in one string, separated as in a shell.
    """
    if text := str(run_config.get("settings", "")):
        return parsed(text)
    from collapipe.config.composing import compose  # imports Hydra
    from collapipe.config.overrides import split

    return compose(split(str(run_config.get("overrides", ""))))


@functools.lru_cache(maxsize=8)  # units of one process share plug-ins and rows
def load_text(text: str) -> Settings:
    """Return the settings of ``Resolved.text``.

    The strategy is not built: only the server needs it, and a unit's machine may lack its class.
    """
    settings = _settings(parsed(text))
    world = {option: build(option, settings.tree.get(option)) for option in _WORLD}
    _check_there(settings.data)
    faults = _segment_faults(settings, world["cluster"].num_devices), _idle_options(settings)
    for fault in chain(_contradictions(settings), *faults, _rows_of_others(settings)):
        raise ConfigError(fault)
    return settings


def load_overrides(overrides: Sequence[str]) -> Settings:
    """Compose ``conf/`` with Hydra overrides and check every value, the strategy's included.

    Raises ``ConfigError``: one line with the option, its value, and how to correct it.
    """
    return complete(outline(overrides))


def outline(overrides: Sequence[str]) -> Settings:
    """Compose as ``load_overrides`` does, and check each value, but not their combination.

    Tasks and models take seconds to import. Raises ``ConfigError`` for an invalid value.
    """
    from collapipe.config.composing import compose  # imports Hydra

    settings = _settings(compose(overrides))
    _check_there(settings.data)
    return settings


def complete(settings: Settings) -> Settings:
    """Check everything that ``outline`` has not checked."""
    _ = settings.planner
    return load_text(settings.text)


def load_saved(file: Path, trusted: Sequence[str] = ()) -> Settings:
    """Return the settings in a run's ``config.yaml``. It may be untrusted, see ``read_saved``."""
    settings = _settings(Resolved(tree=read_saved(file, trusted), run_dir=str(file.parent)))
    for fault in _contradictions(settings):
        raise ConfigError(fault)
    return settings


def _settings(resolved: Resolved) -> Settings:
    """Return the options with each value checked."""
    sections = _sections(resolved.tree)
    data, trains = sections["data"], sections["framework"].train
    sections["evaluation"] = sections["evaluation"].on_rows_of(data, trains)
    return Settings(**vars(resolved), **sections)


def _sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections and numbers of ``Settings``, with each value checked."""
    numbers = {name: checked(name, kind, tree.get(name)) for name, kind in _NUMBERS.items()}
    return numbers | {name: _section(tree, name, kind) for name, kind in _SECTIONS.items()}


def _section(tree: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    section = tree.get(name, {} if name in _LATER else None)
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}={section}: must be a section; set its options, {name}.OPTION=…")
    values = dict(section)
    if name == "data":
        values.pop("partitioner", None)  # a plug-in
    if name == "adapter" and values.get("name") == "lora":
        kind = LoraSettings
    return typed(name, kind, values)


def _check_there(data: DataSettings) -> None:
    for option, path in data.paths().items():
        kind, there = ("folder", path.is_dir()) if option == "root" else ("file", path.is_file())
        if not there:
            raise ConfigError(f"data.{option}={path}: no such {kind} (seen from {Path.cwd()})")


def _contradictions(settings: Settings) -> Iterator[str]:
    """Yield an error message for each combination of options that does not work."""
    task, head, cut = settings.task, settings.model.head, settings.framework.cut
    mode = settings.decoder.mode
    if head not in task.heads:
        from collapipe.models.split import TASKS

        yield (
            f"task={task.name}: trains a head {' or '.join(task.heads)}, and this model has {head}"
            f"; set {TASKS.get(str(head), 'another task')}, or another model: model=huggingface "
            "model.name=FOLDER_OR_HUB_ID or model.family=NAME"
        )
    groups = [settings.tree.get(group) or {} for group in ("strategy", "environment")]
    if all(group.get("fading") == "rayleigh" for group in groups):
        yield (
            "strategy.fading=rayleigh with environment.fading=rayleigh: gains that fade in every "
            "round would be averaged over fading again; set one of them to none"
        )
    if cut is not None and mode in ("control_unit", "auto"):
        yield (
            f"framework.cut={cut}: the blocks behind it are trained with the head on the server, "
            f"but decoder.mode={mode} has that on units; set decoder.mode=per_cluster"
        )
    if settings.compression.feedback and not settings.server_has_heads:
        yield (
            "compression.feedback=true: no activations are sent with decoder.mode=control_unit, or "
            f"with framework={settings.framework.name} where that trains unsplit models; set "
            "compression.feedback=false"
        )
    if settings.privacy.clip_norm is not None:
        yield from _unprotected(settings)
    if settings.privacy.secure_aggregation:
        yield from _unsummed(settings)
    if settings.federation.clock == "real" and not settings.framework.train:
        yield (
            "federation.clock=real: with framework.train=false nothing is trained that could be "
            "measured; set federation.clock=modelled"
        )
    if settings.evaluation.on_units and not settings.framework.train:
        yield (
            f"evaluation.where={settings.evaluation.where}: with framework.train=false nothing is "
            "trained that could be evaluated; leave it out"
        )
    real = hasattr(settings.build("cluster"), "roster")
    if real and settings.framework.unsplit:
        yield (
            f"framework={settings.framework.name}: trains the whole model in the control unit's "
            "process, and the devices of cluster=devices would idle; leave cluster out, or give "
            "each device a unit of its own: collapipe up --devices 1 --clusters N -- run"
        )
    if settings.pipeline.profile and not real:
        yield (
            "pipeline.profile=true: the devices of this run are simulated in one process, so that "
            "their measured times would be those of one machine; leave it out, and give devices "
            "their speeds by cluster.file, or take cluster=devices"
        )
    if settings.pipeline.num_micro_batches > settings.batch_size:
        yield (
            f"pipeline.num_micro_batches={settings.pipeline.num_micro_batches}: more than "
            f"batch_size={settings.batch_size}; a micro-batch holds at least one sample"
        )


def _unprotected(settings: Settings) -> Iterator[str]:
    """Yield messages for options with which clipping and noise would not protect units."""
    clipped = f"privacy.clip_norm={settings.privacy.clip_norm:g}"
    if settings.server_has_heads:
        yield (
            f"{clipped}: with decoder.mode={settings.decoder.mode} units send activations and "
            "targets, which neither clipping nor noise covers; set decoder.mode=control_unit"
        )
    if not settings.framework.aggregate:
        yield (
            f"{clipped}: framework={settings.framework.name} averages nothing, and would show each "
            "unit's model; take another framework, or set privacy.clip_norm=null"
        )
    if settings.federation.weighting != "uniform":
        yield (
            f"{clipped}: bounds a unit where all weigh the same; set federation.weighting=uniform"
        )
    noise, most = settings.privacy.noise_multiplier, settings.federation.max_update_norm
    if noise and most is not None:
        yield (
            f"privacy.noise_multiplier={noise:g}: by federation.max_update_norm={most:g} each "
            "unit's norm decides whether others count, which no noise covers; set it to null: "
            "privacy.clip_norm bounds what units change"
        )
    strategy = settings.tree["strategy"]
    estimated = strategy.get("constants") == "estimated"
    if noise and (estimated or strategy["_target_"] == "optim.baselines.HighestLoss"):
        what = "constants=estimated" if estimated else "_target_=optim.baselines.HighestLoss"
        yield (
            f"privacy.noise_multiplier={noise:g}: strategy.{what} reads losses or gradients, which "
            "no noise covers; set strategy=dssra with strategy.constants=set, delay_only, random, "
            "all or even"
        )
    if settings.server_optimizer.average != "mean":
        yield (
            f"{clipped}: noise is meant for a mean; set server_optimizer.average=mean, or "
            "privacy.clip_norm=null"
        )


def _unsummed(settings: Settings) -> Iterator[str]:
    """Yield messages for options that do not work if the server learns only the updates' sum."""
    federation, masked = settings.federation, "privacy.secure_aggregation=true: "
    if federation.max_update_norm is not None:
        yield (
            f"{masked}federation.max_update_norm={federation.max_update_norm:g} compares the norms "
            "of single updates, which nobody sees; set it to null: privacy.clip_norm bounds them"
        )
    if federation.channel_noise:
        yield (
            f"{masked}federation.channel_noise={federation.channel_noise:g} is noise in single "
            "updates, which nobody sees; set it to 0"
        )
    if settings.compression.upload == "auto":
        yield (
            f"{masked}compression.upload=auto may give units different precisions, in which they "
            "have no sum; choose one"
        )
    if settings.optimizer.state == "keep" and federation.checkpoint_every:
        yield (
            f"{masked}optimizer.state=keep: what a unit's optimiser remembers is made of its "
            "gradients, which no checkpoint may show; set optimizer.state=reset, or "
            "federation.checkpoint_every=0"
        )
    if federation.num_units == 1:
        yield f"{masked}federation.num_units=1: a sum hides nothing of one unit; have more"


def _segment_faults(settings: Settings, most: int) -> Iterator[str]:
    """Yield messages if there are more segments than the ``most`` devices, or than blocks."""
    segments = settings.pipeline.num_segments or 0
    if segments > most:
        yield (
            f"pipeline.num_segments={segments}: more than cluster.num_devices={most}; "
            "a device holds one segment at most"
        )
    if segments > settings.model.num_blocks:
        blocks = "model.num_blocks" if settings.framework.cut is None else "framework.cut"
        if isinstance(settings.adapter, LoraSettings) and settings.adapter.last_blocks:
            blocks = "adapter.last_blocks"
        yield (
            f"pipeline.num_segments={segments}: more than {blocks}={settings.model.num_blocks}; "
            "a segment holds at least one block"
        )


def _rows_of_others(settings: Settings) -> Iterator[str]:
    """Yield a message if the server would need rows from the simulated units' training file."""
    data, where = settings.data, settings.evaluation.where
    shared = settings.tree["data"]["partitioner"] is not None
    if shared and data.holds_out and settings.evaluates_on_server:
        missing = "test" if data.validation_file else "validation"
        yield (
            f"evaluation.where={where}: data.{missing}_file is not set, and the server opens no "
            "training rows to draw any from them; set it, or evaluation.where=units"
        )


def _idle_options(settings: Settings) -> Iterator[str]:
    """Yield messages for options of ``data`` that have no effect with the other options."""
    data, task = settings.data, settings.task
    columns = task.columns if data.brought else ()
    used = {*settings.tree["task"], *(f"{column}_column" for column in columns)}
    used |= {"config"} if data.name is not None else set()
    for field in fields(data):
        name, value = field.name, getattr(data, field.name)
        idle = name in ("root", "synthetic", "config") or name.endswith("_column")
        if not idle or name in used or value == field.default:
            continue
        if name.endswith("_column") and not data.brought:
            why = "names a column of data.train_file or data.name, which are not set"
        elif name == "config":
            why = "belongs to data.name, which is not set"
        else:
            why = f"task={task.name} makes no use of it"
        default = _AS_YAML.get(field.default, field.default)
        yield f"data.{name}={value}: {why}; set data.{name}={default}"
