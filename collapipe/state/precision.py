"""Precisions of sent tensors."""

from typing import Literal

Precision = Literal["float32", "bfloat16", "int8", "int6", "int4"]
"""Precision of a sent tensor, see ``collapipe.wire.compression``; float32 keeps its own dtype."""
HopPrecision = Literal["float32", "bfloat16", "int8"]
"""Precision between stages."""
