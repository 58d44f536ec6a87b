"""Everything that a run is configured by, as one object, and the plug-ins that it names.

``_target_`` names a class, built-in or a user's own; the other keys are its fields.
"""

import functools
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from hydra.utils import get_class

from collapipe import sections
from collapipe.config.saved import value_at
from collapipe.errors import CollaPipeError, ConfigError, one_line
from collapipe.plan import UplinkPlan
from collapipe.validation import typed

if TYPE_CHECKING:  # torch and datasets take seconds, which an option's error can do without
    import torch

    from collapipe.devices.presets import ChannelPreset
    from collapipe.models.split import ModelSpec
    from collapipe.tasks.task import Task

PLUGIN_FOLDER = "COLLAPIPE_PLUGINS"  # the current folder, for processes that have another one
# Of a class that is not found it logs what its error says, which becomes ours.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: plug-ins may be anything
class Settings:
    """The options of a run.

    ``task`` and ``model`` are the chosen plug-ins; ``partitioner``, ``strategy``, ``cluster``,
    ``channel`` and ``environment`` are built by who needs them, see ``build``. ``tree`` is
    the resolved configuration as it is saved, ``overrides`` what it was composed from, and
    ``choices`` the file of ``conf/`` that each group of options came from.
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
    task: "Task"
    model: "ModelSpec"
    tree: Mapping[str, Any]
    run_dir: str
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def server_has_heads(self) -> bool:
        """Whether units may send activations to the server, which trains heads on them."""
        return not self.framework.unsplit and self.decoder.mode != "control_unit"

    @property
    def units_have_heads(self) -> bool:
        """Whether units may train heads of their own."""
        return not self.server_has_heads or self.decoder.mode == "auto"

    @property
    def chooses_heads(self) -> bool:
        """Whether the scheduler decides where a unit's head trains."""
        return self.server_has_heads and self.units_have_heads

    @property
    def chooses_payloads(self) -> bool:
        """Whether the scheduler decides what units send."""
        return self.compression.decided or self.chooses_heads

    @property
    def recomputes(self) -> bool:
        """Whether devices compute each forward twice; who trains without a pipeline does not."""
        return self.pipeline.recompute and not self.framework.unsplit

    @property
    def evaluates_on_server(self) -> bool:
        """Whether the server needs rows of its own; a run that only plans evaluates nothing."""
        return self.framework.train and self.evaluation.on_server

    def unit_has_head(self, uplink: UplinkPlan | None) -> bool:
        """Whether a unit with this plan trains its head by itself."""
        if self.chooses_heads:
            return uplink is not None and uplink.head == "control_unit"
        return self.units_have_heads

    @property
    def unit_device(self) -> "torch.device":
        """What a control unit on this machine computes on. Raises ``ConfigError``."""
        return self._device("runtime.torch_device", self.runtime.torch_device)

    @property
    def server_device(self) -> "torch.device":
        """What the server on this machine computes on. Raises ``ConfigError``."""
        return self._device("server.torch_device", self.server.torch_device)

    def _device(self, option: str, name: str) -> "torch.device":
        from collapipe.torch_device import torch_device

        return torch_device(option, name, self.pipeline.dtype)

    @functools.cached_property
    def planner(self) -> Any:
        """The ``strategy``, built once."""
        return self.build("strategy")

    @functools.cached_property
    def channel(self) -> "ChannelPreset":
        """The channels' preset, built once."""
        preset: ChannelPreset = self.build("channel")
        return preset

    def build(self, option: str) -> Any:
        """The object that a plug-in option such as ``strategy`` or ``data.partitioner`` names."""
        return build(option, value_at(self.tree, option))


def build(option: str, node: Any) -> Any:
    """Instantiate a plug-in from its options, typed where its class is a dataclass."""
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


def check_members(option: str, plugin: object, seam: type[Any]) -> None:
    """Raise ``ConfigError`` that names members of the protocol ``seam`` that ``plugin`` lacks."""
    wanted = {name for name in vars(seam) if not name.startswith("_")}
    if missing := sorted(wanted - {*dir(plugin)}):
        target = type(plugin)
        raise ConfigError(
            f"{option}._target_={target.__module__}.{target.__qualname__}: lacks "
            f"{', '.join(missing)}; {seam.__module__}.{seam.__name__} describes all members"
        )


def is_partitioner(target: type[Any]) -> bool:
    """Whether it takes rows apart as those of Flower Datasets do."""
    from flwr_datasets.partitioner import Partitioner  # imports datasets, which takes seconds

    return issubclass(target, Partitioner)


def class_of(option: str, target: object) -> type[Any]:
    """The class that ``_target_`` names; its module is imported, the current folder's too.

    Raises ``ConfigError``.
    """
    try:
        _import_package(str(target).partition(".")[0])
        return get_class(str(target))
    except (ImportError, ValueError, AttributeError, SyntaxError, HydraException) as error:
        raise ConfigError(f"{option}._target_={target}: {one_line(error)}") from error


def _import_package(name: str) -> None:
    """Import the current folder's ``name`` where Python's own path has none.

    The folder stands on the path meanwhile only: it may be one that somebody else has filled.
    """
    if not name.isidentifier() or name in sys.modules or find_spec(name) is not None:
        return
    folder = os.environ.get(PLUGIN_FOLDER, str(Path.cwd()))
    sys.path.append(folder)
    try:
        importlib.import_module(name)
    finally:
        sys.path.remove(folder)
