"""The frozen weights with which the units of a process compute."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collapipe.models.frozen import FrozenParts
from collapipe.models.split import EMBEDDING, HEAD
from collapipe.tensors import Tensors, aligned


@dataclass(frozen=True, eq=False)
class FixedParts(FrozenParts):
    """Frozen weights by part.

    The ``used`` parts stay in memory on ``device``, once for all units of the process. The others
    are only sent to devices.
    """

    used: Collection[str]
    device: torch.device
    _held: dict[str, Tensors] = field(default_factory=dict, init=False)
    _reading: threading.Lock = field(default_factory=threading.Lock, init=False)

    def lacking(self) -> list[str]:
        """Return the parts that this machine lacks. Those that are used are read."""
        return [part for part in self if self.find(part) is None]

    def find(self, part: str) -> Tensors | None:
        if part not in self.used:
            return super().find(part)
        with self._reading:
            if part not in self._held and (found := super().find(part)) is not None:
                ends = part in (EMBEDDING, HEAD)
                self._held[part] = {n: self._own(each, ends) for n, each in found.items()}
        return self._held.get(part)

    def _own(self, tensor: Tensor, ends: bool) -> Tensor:
        """Return a tensor on the device; if it equals one of the other end, return that one."""
        own = tensor.to(self.device)
        for part in (EMBEDDING, HEAD) if ends else ():
            for each in self._held.get(part, {}).values():
                if each.shape == own.shape and each.dtype == own.dtype and torch.equal(each, own):
                    return each
        return aligned(own)
