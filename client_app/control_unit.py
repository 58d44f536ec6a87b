"""A control unit: its rows, its devices, and the state of its cluster. Independent of Flower."""

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from client_app.cluster_state import cluster_state
from client_app.devices import Devices
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import DeviceCluster
from collapipe.inventory.measured_step import read_step
from collapipe.models.frozen import whole
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import SplitModel, build_empty
from collapipe.process.torch_device import moved
from collapipe.runs.rows import load_held_out, load_shard
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.statistics import Statistics
from collapipe.step_law import StepLaw
from collapipe.tasks.evaluation import Evaluator
from collapipe.tensors import Batch, Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.messages import Split

_log = logging.getLogger(__name__)


class ControlUnit:
    """Unit n = ``number``: its shard and its devices, for all rounds of a run.

    ``device`` computes the embedding and the segments of simulated devices. ``lengths`` has the
    number of tokens of each row. If the cluster's devices are simulated, ``devices`` is None.

    Raises ``DataError`` if a row cannot be read, ``ConfigError`` if this machine lacks the
    ``device``.
    """

    def __init__(self, settings: Settings, number: int, tokenizer: Tokenizer) -> None:
        self.settings, self.number, self.vocabulary = settings, number, tokenizer.vocabulary
        self._tokenizer, self._evaluators = tokenizer, dict[Split, Evaluator | None]()
        self.device, self.dtype = settings.unit_device, getattr(torch, settings.pipeline.dtype)
        self._examples = settings.task.encode(load_shard(settings, number), tokenizer)
        self.lengths = self._examples.lengths
        self._data_seed = derive(settings.seed, "data", number)
        if len(self.lengths) < settings.batch_size:
            _log.warning(
                "unit %d has %d rows, fewer than batch_size=%d: each step takes all of them",
                *(number, len(self.lengths), settings.batch_size),
            )
        cluster = settings.build("cluster")
        real = isinstance(cluster, DeviceCluster) and settings.framework.train
        self.devices = Devices(settings, cluster, number) if real else None
        if settings.compression.feedback:
            tokens = RowsRead.by(settings.model).most(self.lengths)
            _log.info(
                "unit %d: compression.feedback=true keeps %s bytes here, and as many on the server",
                *(number, f"{tokens * settings.model.dim * self.dtype.itemsize:,}"),
            )

    @functools.cached_property
    def described(self) -> ClusterState:
        """The configured cluster, including real devices that do not answer."""
        return cluster_state(self.settings, self.number, self._examples, self.vocabulary)

    def state(self, alive: Collection[str] = ()) -> ClusterState:
        """Return the cluster's current state. Real devices are contacted, except those that are
        known to be ``alive``. A device that does not answer can hold no block."""
        if self.devices is None:
            return self.described
        there = self.devices.present(self.described.devices, alive)
        return replace(self.described, devices=there, real_devices=True, step=self.devices.law)

    def recall_times(self, kept: Mapping[str, Tensors]) -> None:
        """Restore what earlier rounds measured of real devices, before the first one what
        ``collapipe device measure`` did. Raises ``WireError`` if it is impossible."""
        if self.devices is not None:
            self.devices.recall(kept, lambda: self._first_law)

    @functools.cached_property
    def _first_law(self) -> StepLaw | None:
        """The law that was measured before the run; None if none fits."""
        cluster, devices = self.settings.build("cluster"), self.described.devices
        place, names = self.number % cluster.num_units, [each.name for each in devices]
        try:
            return read_step(Path(cluster.file), self.settings.tree, place, names)
        except ConfigError as error:
            _log.warning("round 1 is planned without measured steps: %s", error)
            return None

    def times(self) -> dict[str, Tensors]:
        """The groups of tensors with the measured times of real devices, for the next round; empty
        for simulated ones."""
        return self.devices.kept() if self.devices else {}

    def batch(self, step: int) -> tuple[Batch, Tensor]:
        """Return the batch of a local step and its rows' numbers, int64 [b]. Steps are numbered
        over the whole run."""
        numbers = batch_rows(self.lengths, self.settings.batch_size, step, self._data_seed)
        rows = torch.from_numpy(numbers)
        return replace(self._examples.batch(numbers.tolist()), rows=rows), rows

    def evaluate(
        self, split: Split, weights: Tensors, fixed: Mapping[str, Tensors]
    ) -> Statistics | None:
        """Return statistics of the model's answers on the unit's rows, or None if it has no rows.

        ``fixed`` are the frozen weights by part. Raises ``DataError``, ``ConfigError``,
        ``NonFiniteLossError`` or ``CancelledRoundError``.
        """
        task, spec = self.settings.task, self.settings.model
        if split not in self._evaluators:
            rows = load_held_out(self.settings, self.number, split)
            made = None if rows is None else Evaluator(task, rows, self._tokenizer, apart=True)
            self._evaluators[split] = made
        if (evaluator := self._evaluators[split]) is None:
            return None
        model = build_empty(lambda: SplitModel(spec, self.vocabulary), whole(fixed) | weights)
        return evaluator.statistics(moved(model, self.device))
