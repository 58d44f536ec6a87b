"""Dropout whose masks depend on a key and not on who computes them, or when.

torch's CPU generator belongs to the process: units that train side by side would take numbers from
each other. Here every part of the model draws from a generator of its own, made from the key (unit,
step, micro-batch, part), so that neither threads nor the cut into segments change a mask.

A tensor on another device needs a generator of that device, which is made of the same seed. It
draws other numbers than the CPU's: a mask depends on its key and on the kind of device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from collapipe.seeds import derive

_Generators = dict[torch.device, torch.Generator]
_generators: ContextVar[_Generators | None] = ContextVar("collapipe_dropout", default=None)


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """Whose dropout, and when: all but the part of the model and the micro-batch."""

    seed: int
    unit: int
    step: int

    def generator(self, part: str, micro_batch: int) -> torch.Generator:
        """The random stream of one part (such as ``blocks.3``) for one micro-batch, or of what
        travels rounded by chance (``activation``, ``gradient``)."""
        seed = derive(self.seed, "dropout", self.unit, self.step, part, micro_batch)
        return torch.Generator().manual_seed(seed)


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Inside, ``Dropout`` draws from ``generator``, on other devices from one of its seed."""
    token = _generators.set({generator.device: generator})
    try:
        yield
    finally:
        _generators.reset(token)


class Dropout(nn.Module):
    """Zero each element with ``probability`` and scale the rest by 1 / (1 − probability)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; raises ``RuntimeError`` in training outside of ``drawing_from``."""
        return dropout(x, self.probability) if self.training else x


def dropout(x: Tensor, probability: float) -> Tensor:
    """Same shape; raises ``RuntimeError`` outside of ``drawing_from``."""
    if probability == 0.0:
        return x
    generators = _generators.get()
    if generators is None:
        raise RuntimeError("dropout in training needs drawing_from(generator)")
    kept = 1.0 - probability
    mask = torch.empty_like(x).bernoulli_(kept, generator=_on(x.device, generators))
    return x * mask.div_(kept)


def _on(device: torch.device, generators: _Generators) -> torch.Generator:
    """The generator of ``device``, which goes on where it stopped; made at its first use."""
    if device not in generators:
        first = next(iter(generators.values()))
        generators[device] = torch.Generator(device).manual_seed(first.initial_seed())
    return generators[device]


class ForeignDropout(TorchFunctionMode):
    """Inside, every ``torch.nn.functional.dropout`` draws from the part's generator.

    For modules that are not ours: it reaches ``nn.Dropout``, functional calls and dropout on
    attention weights alike, and changes none of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's protocol for modes."""
        return (_redirected if func is functional.dropout else func)(*args, **(kwargs or {}))


def _redirected(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``functional.dropout`` with its own signature."""
    return dropout(x, p) if training else x
