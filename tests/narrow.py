"""Models whose frozen weights are kept in bfloat16, and the same with these weights in float32."""

import copy
from typing import Any, TypeVar

from torch import nn

from collapipe.models.kept import keep, widen

M = TypeVar("M", bound=nn.Module)


def kept(
    part: M,
    dtype: str = "bfloat16",
    computes: str = "float32",
    quantization: str | None = None,
    wide: str | None = None,
) -> M:
    """A copy that keeps its frozen weights narrow."""
    return keep(copy.deepcopy(part), dtype, computes, quantization, wide)


def rounded(part: M, *how: Any, **options: Any) -> M:
    """As ``kept``, with the weights in the dtype in which they compute; also a stand-in for
    ``keep``."""
    return widen(kept(part, *how, **options))
