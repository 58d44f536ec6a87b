"""All options of a run as one object, and the plug-ins that they name.

``_target_`` names a class, built-in or a user's; the other keys are its fields.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from collapipe import sections
from collapipe.config.resolved import Resolved, value_at
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.plan import UplinkPlan
from collapipe.validation import checked, typed

if TYPE_CHECKING:  # importing torch and datasets takes seconds; option errors should be faster
    import torch

    from collapipe.devices.presets import ChannelPreset
    from collapipe.models.split import ModelSpec
    from collapipe.tasks.task import Task

CONF = Path(__file__).parents[2] / "conf"
PLUGIN_FOLDER = "COLLAPIPE_PLUGINS"  # the user's current folder, for processes with another one


@dataclass(frozen=True, eq=False, kw_only=True)  # hashed by identity: plug-ins may be anything
class Settings(Resolved):
    """The options of a run, with each value checked.

    Plug-ins such as ``task`` and ``strategy`` are built when they are needed, see ``build``.
    """

    seed: int
    batch_size: int
    data: sections.DataSettings
    pipeline: sections.PipelineSettings
    optimizer: sections.OptimizerSettings
    federation: sections.FederationSettings
    server_optimizer: sections.ServerOptimizerSettings
    decoder: sections.DecoderSettings
    compression: sections.CompressionSettings
    privacy: sections.PrivacySettings
    adapter: sections.AdapterSettings
    link: sections.LinkSettings
    framework: sections.FrameworkSettings
    runtime: sections.RuntimeSettings
    server: sections.ServerSettings
    evaluation: sections.EvaluationSettings
    tracking: sections.TrackingSettings

    @property
    def has_owners_rows(self) -> bool:
        """Whether a unit has its owner's training rows, not a part of rows that all units share."""
        return value_at(self.tree, "data.partitioner") is None

    @property
    def server_has_heads(self) -> bool:
        """Whether the server may train heads on activations that units send."""
        return not self.framework.unsplit and self.decoder.mode != "control_unit"

    @property
    def units_have_heads(self) -> bool:
        """Whether units may train heads."""
        return not self.server_has_heads or self.decoder.mode == "auto"

    @property
    def computing_at_once(self) -> int:
        """How many parts of a run in one process compute at once: units, and the server's heads.

        Waiting threads of torch keep their cores busy, so that the parts slow each other down.
        """
        return self.federation.num_units + self.server_has_heads

    @property
    def chooses_heads(self) -> bool:
        """Whether the scheduler decides where a unit's head trains."""
        return self.server_has_heads and self.units_have_heads

    @property
    def chooses_payloads(self) -> bool:
        """Whether the scheduler chooses precisions or heads, and so the sizes of messages."""
        upload, activation = self.compression.upload, self.compression.activation
        return "auto" in (upload, self.server_has_heads and activation) or self.chooses_heads

    @property
    def recomputes(self) -> bool:
        """Whether all devices compute each forward pass twice; never without a pipeline."""
        return self.pipeline.recompute is True and not self.framework.unsplit

    @property
    def may_recompute(self) -> bool:
        """Whether the planner decides which devices do."""
        return self.pipeline.recompute == "auto" and not self.framework.unsplit

    @property
    def evaluates_on_server(self) -> bool:
        """Whether the server needs rows to evaluate on; a run that only plans does not."""
        return self.framework.train and self.evaluation.on_server

    def unit_has_head(self, uplink: UplinkPlan | None) -> bool:
        """Whether a unit with this plan trains its head itself."""
        if self.chooses_heads:
            return uplink is not None and uplink.head == "control_unit"
        return self.units_have_heads

    @property
    def unit_device(self) -> "torch.device":
        """torch device of a control unit on this machine.

        Raises ``ConfigError`` if it is not usable.
        """
        return self._device("runtime.torch_device", self.runtime.torch_device)

    @property
    def server_device(self) -> "torch.device":
        """torch device of the server on this machine.

        Raises ``ConfigError`` if it is not usable.
        """
        return self._device("server.torch_device", self.server.torch_device)

    def _device(self, option: str, name: str) -> "torch.device":
        from collapipe.process.torch_device import torch_device

        return torch_device(option, name, self.pipeline.dtype)

    @functools.cached_property
    def task(self) -> "Task":
        """The plug-in of ``task``, built once."""
        from collapipe.tasks.task import Task

        task = self.build("task")
        check_members("task", task, Task)
        return cast(Task, task)

    @functools.cached_property
    def model(self) -> "ModelSpec":
        """The plug-in of ``model``, built once, with adapters and without blocks after the cut."""
        from collapipe.models.cut import cut_at
        from collapipe.models.lora import with_adapters
        from collapipe.models.split import ModelSpec

        model = self.build("model")
        check_members("model", model, ModelSpec)
        try:
            hash(model)
        except TypeError as error:  # of a field, or of a dataclass that is not frozen
            kind = type(model).__qualname__
            raise ConfigError(
                f"model: a {kind} has no hash ({error}); make it a frozen dataclass, with tuples "
                "instead of lists"
            ) from error
        checked("model.num_blocks", sections.Count, model.num_blocks)
        return cut_at(with_adapters(model, self.adapter, self.pipeline.dtype), self.framework.cut)

    @functools.cached_property
    def planner(self) -> Any:
        """The plug-in of ``strategy``, built once."""
        return self.build("strategy")

    @functools.cached_property
    def channel(self) -> "ChannelPreset":
        """The plug-in of ``channel``, built once."""
        preset: ChannelPreset = self.build("channel")
        return preset

    def build(self, option: str) -> Any:
        """Build the plug-in that an option such as ``strategy`` or ``data.partitioner`` names."""
        return build(option, value_at(self.tree, option))


def build(option: str, node: Any) -> Any:
    """Build a plug-in from its options; the fields of a dataclass are type-checked.

    Raises ``ConfigError`` for an unsuitable class or invalid options.
    """
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{option}: has no _target_; choose one of the files in conf/{option}/")
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    target = class_of(option, node["_target_"])
    if not is_dataclass(target) and not (option == "data.partitioner" and is_partitioner(target)):
        raise ConfigError(f"{option}._target_={node['_target_']}: must be a dataclass")
    try:
        return typed(option, target, arguments) if is_dataclass(target) else target(**arguments)
    except CollaPipeError:
        raise
    except Exception as error:  # the class may be a user's own
        raise ConfigError(
            f"{option}: {node['_target_']} refused its options: {one_line(error)}"
        ) from error


def check_members(option: str, plugin: object, seam: type[Any], made_by: str = "_target_") -> None:
    """Raise ``ConfigError`` if ``plugin`` lacks a member of the protocol ``seam``, or has a method
    that takes other arguments; it names the members."""
    wanted = {name for name in vars(seam) if not name.startswith("_")}
    methods = {name for name in wanted if inspect.isfunction(getattr(seam, name))}
    if missing := sorted(wanted - {*dir(plugin)}):
        fault = f"lacks {', '.join(missing)}"
    elif other := [name for name in sorted(methods) if not _takes_arguments_of(plugin, seam, name)]:
        fault = f"{other[0]} must take ({', '.join(_arguments(seam, other[0]))})"
    else:
        return
    target = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
    described = f"{seam.__module__}.{seam.__name__} describes all members"
    raise ConfigError(f"{option}.{made_by}={target}: {fault}; {described}")


def _takes_arguments_of(plugin: object, seam: type[Any], name: str) -> bool:
    """Whether a method of ``plugin`` can be called with the arguments of the one of ``seam``."""
    try:
        inspect.signature(getattr(plugin, name)).bind(*_arguments(seam, name))
    except TypeError:
        return False
    except ValueError:  # compiled code may not tell
        return True
    return True


def _arguments(seam: type[Any], name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(seam, name)).parameters)[1:]


def is_partitioner(target: type[Any]) -> bool:
    """Whether ``target`` is a partitioner of Flower Datasets."""
    from flwr_datasets.partitioner import Partitioner  # imports datasets, which takes seconds

    return issubclass(target, Partitioner)


def class_of(option: str, target: object) -> type[Any]:
    """Import and return the class that ``_target_`` names; it may be in the current folder.

    Raises ``ConfigError`` if it cannot be imported.
    """
    module, _, name = str(target).rpartition(".")
    try:
        _import_package(module.partition(".")[0])
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module may be a user's own
        raise ConfigError(f"{option}._target_={target}: {one_line(error)}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{option}._target_={target}: must be a class")
    return found


def _import_package(name: str) -> None:
    """Import the package ``name`` from the current folder if Python's path lacks it.

    The folder is on the path only during the import, because its other files may be untrusted.
    """
    if not name.isidentifier() or name in sys.modules or find_spec(name) is not None:
        return
    folder = os.environ.get(PLUGIN_FOLDER, str(Path.cwd()))
    sys.path.append(folder)
    try:
        importlib.import_module(name)
    finally:
        sys.path.remove(folder)
