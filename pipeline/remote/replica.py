"""Copies of all blocks on the control unit's disk: what a cluster goes on from without a device."""

import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from safetensors.torch import load, save

from collapipe.models.part import prefixed, select
from collapipe.tensors import Tensors

Start = Callable[[str], Tensors]
"""A block's weights and optimiser state before the round's first step, by their names in the whole
model."""


class Replica:
    """Of each block what trains, with the optimiser's state, as it is after a step.

    ``step`` is the last one that is complete; before the first is, blocks are as at the ``start``.
    Devices' threads ``put`` at once; older steps than the last complete one are forgotten.
    """

    def __init__(self, blocks: Collection[str], start: Start) -> None:
        self._blocks, self._start = blocks, start
        self._lock = threading.Lock()
        self._have: defaultdict[int, set[str]] = defaultdict(set)
        self.step: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="collapipe-replica-"))

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def put(self, name: str, step: int, data: bytes) -> None:
        """Keep a block as it is after ``step``."""
        if name not in self._blocks:
            return
        self._file(name, step).write_bytes(data)
        with self._lock:
            self._have[step].add(name)
            if len(self._have[step]) < len(self._blocks) or not self._newer(step):
                return
            self.step = step
            for older in [each for each in self._have if each < step]:
                for block in self._have.pop(older):
                    self._file(block, older).unlink(missing_ok=True)

    def packed(self, name: str) -> bytes:
        """A block with all its weights, as safetensors."""
        return save({key: tensor.contiguous() for key, tensor in self.tensors(name).items()})

    def tensors(self, name: str) -> Tensors:
        """The same, as tensors by their names in the whole model."""
        start = self._start(name)
        if self.step is None:
            return start
        weights = {key: tensor for key, tensor in start.items() if "/" not in key}
        return weights | load(self._file(name, self.step).read_bytes())

    def _newer(self, step: int) -> bool:
        return self.step is None or self.step < step

    def _file(self, name: str, step: int) -> Path:
        return self._folder / f"{name}-{step}.safetensors"


def starting_with(weights: Tensors, state: Tensors) -> Start:
    """A block's share of the encoder's weights and optimiser state."""

    def start(name: str) -> Tensors:
        return prefixed(name, select(weights, name)) | prefixed(name, select(state, name))

    return start
