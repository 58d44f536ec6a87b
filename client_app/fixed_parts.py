"""The frozen weights with which the units of a process compute."""

import threading
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from collapipe.models.frozen import FrozenParts
from collapipe.models.split import EMBEDDING, HEAD
from collapipe.tensors import Tensors, aligned


class FixedParts(Mapping[str, Tensors]):
    """Frozen weights by part, looked for in ``parts`` when they are read.

    The ``used`` parts stay in memory on ``device``, once for all units of the process. The others
    are only sent to devices.
    """

    def __init__(self, parts: FrozenParts, used: Collection[str], device: torch.device) -> None:
        self.parts, self._used, self._device = parts, used, device
        self._held = dict[str, Tensors]()
        self._reading = threading.Lock()

    def lacking(self) -> list[str]:
        """Return the parts that this machine lacks. Those that are used are read."""
        return [part for part in self if self._found(part) is None]

    def __getitem__(self, part: str) -> Tensors:
        found = self._found(part)
        return self.parts[part] if found is None else found  # the former raises

    def _found(self, part: str) -> Tensors | None:
        if part not in self._used:
            return self.parts.find(part)
        with self._reading:
            if part not in self._held and (found := self.parts.find(part)) is not None:
                ends = part in (EMBEDDING, HEAD)
                self._held[part] = {n: self._own(each, ends) for n, each in found.items()}
        return self._held.get(part)

    def _own(self, tensor: Tensor, ends: bool) -> Tensor:
        """Return a tensor on the device; if it equals one of the other end, return that one."""
        own = tensor.to(self._device)
        for part in (EMBEDDING, HEAD) if ends else ():
            for each in self._held.get(part, {}).values():
                if each.shape == own.shape and each.dtype == own.dtype and torch.equal(each, own):
                    return each
        return aligned(own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
