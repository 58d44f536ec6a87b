"""A control unit: its rows, its devices, the state of its cluster, and its memory of rows between
rounds. Independent of Flower."""

import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client_app.cluster_state import cluster_state
from client_app.devices.known_devices import Devices
from collapipe.config import Settings
from collapipe.data.shards import batch_rows
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import DeviceCluster
from collapipe.inventory.measured_step import read_step
from collapipe.models.cost import rows_of_input
from collapipe.models.frozen import whole
from collapipe.models.sent_rows import RowsRead
from collapipe.models.split import SplitModel, build_empty
from collapipe.process.torch_device import moved
from collapipe.runs.rows import load_held_out, load_shard
from collapipe.sections import LoraSettings
from collapipe.seeds import derive
from collapipe.state import ClusterState
from collapipe.statistics import Statistics
from collapipe.step_law import StepLaw
from collapipe.tasks.evaluation import Evaluator
from collapipe.tensors import Batch, Tensors
from collapipe.text.tokenizer import Tokenizer
from collapipe.wire.compression.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.messages import ACTIVATIONS, STEM, STEM_ROWS, Split, TrainRequest

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
            _log.warning("steps measured before the run are not used: %s", error)
            return None

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


@dataclass
class StemRows:
    """A round's account of the rows that a unit's frozen stem must compute.

    The content of the real disk depends on other runs, interruptions and other users of the
    machine. The modelled clock therefore assumes that each unit began with an empty disk.
    """

    sizes: NDArray[np.int64]  # bytes of each row's activation, [rows]
    kept: NDArray[np.bool_]  # activations that earlier steps kept, [rows]; ``take`` updates it
    limit_bytes: int  # largest total size of kept activations; 0 keeps none
    computed: int = 0  # rows that this round's steps had to compute

    def take(self, rows: NDArray[np.int64]) -> None:
        """Count the rows of a step that are not kept, and keep them up to the limit."""
        new = rows[~self.kept[rows]]
        room = self.limit_bytes - int(self.sizes[self.kept].sum())
        self.computed += len(new)
        self.kept[new[np.cumsum(self.sizes[new]) <= room]] = True


def stem_rows(unit: ControlUnit, kept: Mapping[str, Tensors]) -> StemRows:
    """Return the round's account of rows that a frozen stem computes. Stored rows that the unit no
    longer has are ignored, because a resumed run may have fewer rows."""
    adapter, spec = unit.settings.adapter, unit.settings.model
    further = rows_of_input(spec, tokens=0)
    stored = np.zeros(len(unit.lengths), np.bool_)
    if (numbers := kept.get(STEM, {}).get(STEM_ROWS)) is not None:
        stored[numbers.numpy()[numbers.numpy() < len(stored)]] = True
    return StemRows(
        (np.asarray(unit.lengths, np.int64) + further) * spec.dim * unit.dtype.itemsize,
        stored,
        adapter.cache_bytes if isinstance(adapter, LoraSettings) and adapter.cache else 0,
    )


def activation_memory(unit: ControlUnit, kept: Tensors) -> ActivationMemory:
    """Unpack the ``kept`` activations of the unit's rows; rows that the unit no longer has are
    ignored. Raises ``WireError`` if they do not fit this model."""
    memory = ActivationMemory.unpack(kept, unit.settings.model.dim, unit.dtype)
    there = {row: each for row, each in memory.rows.items() if row < len(unit.lengths)}
    return replace(memory, rows=there)


def change_coder(
    unit: ControlUnit, request: TrainRequest, kept: Mapping[str, Tensors]
) -> ChangeCoder | None:
    """Return the round's coder of activations as changes, or None if activations are sent whole or
    not at all.

    The unit does not know whether the server counted the last round, so it keeps the activations
    before and after that round. The request says which of them the server remembers.
    """
    if not unit.settings.compression.feedback or request.link is None:
        return None
    known, later = (activation_memory(unit, kept.get(key, {})) for key in ACTIVATIONS)
    return ChangeCoder(known.agreed(later, request.remembered), request.round, len(unit.lengths))
