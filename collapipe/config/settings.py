"""Everything that a run is configured by, as one object."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collapipe import sections
from collapipe.config.typed import build

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
    data: sections.DataSettings
    pipeline: sections.PipelineSettings
    optimizer: sections.OptimizerSettings
    federation: sections.FederationSettings
    server_optimizer: sections.ServerOptimizerSettings
    decoder: sections.DecoderSettings
    compression: sections.CompressionSettings
    adapter: sections.AdapterSettings
    link: sections.LinkSettings
    framework: sections.FrameworkSettings
    runtime: sections.RuntimeSettings
    tracking: sections.TrackingSettings
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
