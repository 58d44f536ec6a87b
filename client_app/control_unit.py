"""A control unit: its rows, its devices, and the state of its cluster. Independent of Flower."""

import functools
import logging
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from client_app.cluster_state import cluster_state
from client_app.devices import Devices
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.inventory.cluster import DeviceCluster
from collapipe.models.sent_rows import RowsRead
from collapipe.runs.rows import load_shard
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.tensors import Batch, Tensors
from collapipe.text.tokenizer import Tokenizer

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
        return replace(self.described, devices=there, real_devices=True)

    def recall_slowness(self, kept: Tensors) -> None:
        """Restore the speeds of real devices that earlier rounds measured. Raises ``WireError`` if
        they are impossible."""
        if self.devices is not None:
            self.devices.recall(kept)

    def slowness(self) -> Tensors:
        """The measured speeds of real devices, for the next round; empty for simulated ones."""
        return self.devices.slowness.pack() if self.devices else {}

    def batch(self, step: int) -> tuple[Batch, Tensor]:
        """Return the batch of a local step and its rows' numbers, int64 [b]. Steps are numbered
        over the whole run."""
        numbers = batch_rows(self.lengths, self.settings.batch_size, step, self._data_seed)
        rows = torch.from_numpy(numbers)
        return replace(self._examples.batch(numbers.tolist()), rows=rows), rows
