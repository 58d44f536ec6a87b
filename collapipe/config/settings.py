"""Everything that a run is configured by, as one object."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collapipe.config.typed import build
from collapipe.sections import (
    AdapterSettings,
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

if TYPE_CHECKING:  # torch and datasets take seconds, which an option's error can do without
    from collapipe.models.split import ModelSpec
    from collapipe.tasks.task import Task


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: plug-ins may be anything
class Settings:
    """Everything that a run is configured by.

    ``task`` and ``model`` are the chosen plug-ins; ``partitioner``, ``strategy``, ``cluster``,
    ``channel`` and ``environment`` are built by who needs them, see ``build``. ``tree`` is
    the resolved configuration as it is saved, ``overrides`` what it was composed from, and
    ``choices`` the file of ``conf/`` that each group of options came from.
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
    task: "Task"
    model: "ModelSpec"
    tree: Mapping[str, Any]
    run_dir: str
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def server_has_heads(self) -> bool:
        """Whether units send activations to the server, which trains the head on them."""
        return not self.framework.unsplit and self.decoder.mode != "control_unit"

    @functools.cached_property
    def planner(self) -> Any:
        """The ``strategy``, built once."""
        return self.build("strategy")

    def build(self, option: str) -> Any:
        """The object that a plug-in option such as ``strategy`` or ``data.partitioner`` names."""
        node: Any = self.tree
        for key in option.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return build(option, node)
