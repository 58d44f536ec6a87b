"""Models that store frozen weights in bfloat16, and the same models with these weights in
float32."""

import copy
from typing import Any, TypeVar

from torch import nn

from collapipe.models.weights.kept import keep, widen

M = TypeVar("M", bound=nn.Module)


def kept(
    part: M,
    dtype: str = "bfloat16",
    computes: str = "float32",
    quantization: str | None = None,
    wide: str | None = None,
) -> M:
    """Return a copy that stores its frozen weights in ``dtype``."""
    return keep(copy.deepcopy(part), dtype, computes, quantization, wide)


def rounded(part: M, *how: Any, **options: Any) -> M:
    """Like ``kept``, with the weights widened to their compute dtype; can replace ``keep``."""
    return widen(kept(part, *how, **options))
