"""What micro-batches keep between their forward and their backward, and that it fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from collapipe.errors import ConfigError
from collapipe.models.dropout import drawing_from
from collapipe.models.part import Part

_TRIED = (2, 4, 6)  # tokens of samples whose activations are measured


class KeptMemory:
    """Counts what autograd saves for each micro-batch under way, beside ``held_bytes`` of blocks.

    What a sample of s tokens takes is a polynomial of s, of degree 2 for attention's scores: three
    small samples tell it, in the dearer of the first and the last block.
    """

    def __init__(self, parts: Sequence[Part], held_bytes: float, memory_bytes: float) -> None:
        self._parts, self._held, self._memory = parts, held_bytes, memory_bytes
        self._kept: dict[int, float] = {}
        self._law: tuple[Tensor, int] | None = None

    def admit(self, micro_batch: int, hidden: Tensor, mask: Tensor) -> None:
        """Count a micro-batch whose forward comes next. Raises ``ConfigError`` where it would not
        fit, before anything of it is computed."""
        if self._law is None:
            rows = hidden.shape[1] - mask.shape[1]  # that T5's blocks hand on
            tried = [_saved_bytes(self._ends(), each, rows, hidden) for each in _TRIED]
            points = torch.tensor(_TRIED, dtype=torch.float64)
            self._law = torch.linalg.solve(torch.vander(points), torch.tensor(tried).double()), rows
        (square, linear, constant), rows = self._law[0].tolist(), self._law[1]
        s = hidden.shape[1] - rows
        sample = (square * s + linear) * s + constant
        self._kept[micro_batch] = hidden.shape[0] * len(self._parts) * sample
        needed = self._held + sum(self._kept.values())
        if needed > self._memory:
            raise ConfigError(
                f"{len(self._parts)} blocks and the activations of {len(self._kept)} micro-batches "
                f"{list(hidden.shape)} need {needed:,.0f} bytes, this device gives "
                f"{self._memory:,.0f}; raise --memory, or lower batch_size or the blocks here"
            )

    def release(self, micro_batch: int) -> None:
        """Its backward comes next."""
        self._kept.pop(micro_batch, None)

    def forget(self) -> None:
        """No micro-batch is under way."""
        self._kept.clear()

    def _ends(self) -> Sequence[Part]:
        return self._parts[:: len(self._parts) - 1] if len(self._parts) > 1 else self._parts


def _saved_bytes(parts: Sequence[Part], tokens: int, rows: int, like: Tensor) -> int:
    """The most that is saved for one of ``parts``, beside its weights."""
    device = parts[0].device
    hidden = torch.zeros(1, tokens + rows, like.shape[2], dtype=like.dtype, device=device)
    mask = torch.ones(1, tokens, dtype=torch.bool, device=device)
    most = 0
    for part in parts:
        saved: dict[int, int] = {}

        def save(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # itself would hold the graph that holds it, for ever

        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, drawing_from(torch.Generator()):
            hidden = part.module(hidden.detach().requires_grad_(), mask)
        for own in (*part.module.parameters(), *part.module.buffers()):
            saved.pop(own.untyped_storage().data_ptr(), None)
        most = max(most, sum(saved.values()))
    return most
