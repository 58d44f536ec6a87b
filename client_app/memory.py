"""Convert a unit's memory of its rows between rounds to the form that a round uses."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from client_app.control_unit import ControlUnit
from collapipe.models.cut import rows_behind
from collapipe.models.stem import StemSpec
from collapipe.sections import LoraSettings
from collapipe.tensors import Tensors
from collapipe.wire.feedback import ActivationMemory, ChangeCoder
from collapipe.wire.messages import ACTIVATIONS, STEM, STEM_ROWS, TrainRequest


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
    further = rows_behind(spec.base, spec.frozen_blocks) if isinstance(spec, StemSpec) else 0
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
