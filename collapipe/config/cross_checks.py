"""Options that must agree with each other: each is right by itself, together they may not be."""

from dataclasses import fields
from typing import TYPE_CHECKING

from collapipe.config.settings import Settings
from collapipe.errors import ConfigError

if TYPE_CHECKING:
    from collapipe.devices.presets import ClusterPreset


def check_together(settings: Settings) -> None:
    """Raise ``ConfigError`` where two options contradict each other."""
    _check_head(settings)
    _check_fading(settings)
    _check_cut(settings)
    _check_clock(settings)
    _check_profile(settings)
    if settings.pipeline.num_micro_batches > settings.batch_size:
        raise ConfigError(
            f"pipeline.num_micro_batches={settings.pipeline.num_micro_batches}: more than "
            f"batch_size={settings.batch_size}; a micro-batch holds at least one sample"
        )


def check_segments(settings: Settings, cluster: "ClusterPreset") -> None:
    """Raise ``ConfigError`` for more segments than devices or blocks."""
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


def check_effects(settings: Settings) -> None:
    """Raise ``ConfigError`` for an option of ``data`` that changes nothing with the others."""
    data, task = settings.data, settings.task
    brought = data.train_file is not None or data.name is not None
    columns = task.columns if brought else ()
    used = {*settings.tree["task"], *(f"{column}_column" for column in columns)}
    used |= {"config"} if data.name is not None else set()
    for field in fields(data):
        name, value = field.name, getattr(data, field.name)
        idle = name in ("root", "synthetic", "config") or name.endswith("_column")
        if not idle or name in used or value == field.default:
            continue
        if name.endswith("_column") and not brought:
            why = "names a column of data.train_file or data.name, which are not set"
        elif name == "config":
            why = "belongs to data.name, which is not set"
        else:
            why = f"task={task.name} makes no use of it"
        raise ConfigError(f"data.{name}={value}: {why}; set data.{name}={_text(field.default)}")


def _text(value: object) -> str:
    return {None: "null", False: "false"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]


def _check_head(settings: Settings) -> None:
    task, head = settings.task, settings.model.head
    if head in task.heads:
        return
    from collapipe.models.split import TASKS

    raise ConfigError(
        f"task={task.name}: trains a head {' or '.join(task.heads)}, and this model has {head}; "
        f"set {TASKS.get(str(head), 'another task')}, or another model: model=huggingface "
        "model.name=FOLDER_OR_HUB_ID or model.family=NAME"
    )


def _check_fading(settings: Settings) -> None:
    groups = [settings.tree.get(group) or {} for group in ("strategy", "environment")]
    if all(group.get("fading") == "rayleigh" for group in groups):
        raise ConfigError(
            "strategy.fading=rayleigh with environment.fading=rayleigh: gains that fade in every "
            "round would be averaged over fading again; set one of them to none"
        )


def _check_cut(settings: Settings) -> None:
    cut, mode = settings.framework.cut, settings.decoder.mode
    if cut is not None and mode == "control_unit":
        raise ConfigError(
            f"framework.cut={cut}: the blocks behind it are trained with the head on the server, "
            f"but decoder.mode={mode} keeps that on the units; set decoder.mode=per_cluster"
        )


def _check_clock(settings: Settings) -> None:
    if settings.federation.clock == "real" and not settings.framework.train:
        raise ConfigError(
            "federation.clock=real: with framework.train=false nothing is trained that could be "
            "measured; set federation.clock=modelled"
        )


def _check_profile(settings: Settings) -> None:
    if settings.pipeline.profile:
        raise ConfigError(
            "pipeline.profile=true: all devices of a run compute in one process, so that their "
            "measured times would be those of one machine; leave it out, and give devices their "
            "speeds by cluster.file"
        )
