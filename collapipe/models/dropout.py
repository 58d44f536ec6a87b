"""Dropout whose masks depend on a key, not on the process or the time of computation.

torch's CPU generator belongs to the process, so units that train in parallel threads would share
one random stream. Here each part of the model draws from its own generator, seeded by the key
(unit, step, micro-batch, part, and share if devices share a segment). So masks do not depend on
threads, on the cut into segments, or on the device that computes a share.

A tensor on another device needs a generator of that device. It has the same seed but draws other
numbers than the CPU's: a mask depends on its key and on the kind of device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from collapipe.seeds import derive

_Source = dict[torch.device, torch.Generator]
_source: ContextVar[_Source | None] = ContextVar("collapipe_dropout", default=None)


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """The unit and step of a dropout mask, and the ``share`` of a segment that is computed in
    several; the part and micro-batch complete the key."""

    seed: int
    unit: int
    step: int
    share: int | None = field(default=None, kw_only=True)

    def generator(self, part: str, micro_batch: int) -> torch.Generator:
        """Return the random stream of a part, such as ``blocks.3``, for one micro-batch.

        The names ``activation`` and ``gradient`` give the streams of stochastic rounding.
        """
        share = () if self.share is None else (self.share,)
        seed = derive(self.seed, "dropout", self.unit, self.step, part, micro_batch, *share)
        return torch.Generator().manual_seed(seed)

    def drawing(self, part: str, micro_batch: int) -> AbstractContextManager[None]:
        """Let the dropout of a part draw its masks for one micro-batch."""
        return drawing_from(self.generator(part, micro_batch))


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let ``Dropout`` draw from ``generator``; other devices use a generator of the same seed."""
    token = _source.set({generator.device: generator})
    try:
        yield
    finally:
        _source.reset(token)


class Dropout(nn.Module):
    """Zero each element with ``probability`` and scale the rest by 1 / (1 − probability)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``.

        Raises ``RuntimeError`` in training mode outside ``drawing_from``.
        """
        return dropout(x, self.probability) if self.training else x


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return a tensor of the shape of ``x``. Raises ``RuntimeError`` outside ``drawing_from``."""
    if probability == 0.0:
        return x
    generators = _source.get()
    if generators is None:
        raise RuntimeError("dropout in training needs drawing_from(generator)")
    kept = 1.0 - probability
    mask = torch.empty_like(x).bernoulli_(kept, generator=_on(x.device, generators))
    return x * mask.div_(kept)


def _on(device: torch.device, generators: _Source) -> torch.Generator:
    """Return the generator of ``device``, created at its first use."""
    if device not in generators:
        first = next(iter(generators.values()))
        generators[device] = torch.Generator(device).manual_seed(first.initial_seed())
    return generators[device]


class ForeignDropout(TorchFunctionMode):
    """Let the dropout of other libraries' modules draw from the part's generator.

    It serves ``nn.Dropout``, functional calls, and dropout of attention weights. Attention that
    drops nothing remains torch's fused kernel.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace dropout calls; torch calls this method for every function in the mode."""
        kwargs = kwargs or {}
        if func is functional.dropout:
            func = _redirected
        elif func is functional.scaled_dot_product_attention and kwargs.get("dropout_p"):
            func = _attention
        return func(*args, **kwargs)


def _redirected(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Replace ``functional.dropout``; same signature."""
    return dropout(x, p) if training else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace ``functional.scaled_dot_product_attention``, whose kernels draw from torch's global
    generator; same signature. Bits equal transformers' eager attention."""
    if enable_gqa:
        of_group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(of_group, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        none = scores.new_zeros(attn_mask.shape)
        attn_mask = none.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    if attn_mask is not None:
        scores = scores + attn_mask
    return dropout(scores.softmax(-1), dropout_p) @ value
