"""Encoding of activations and gradients between stages: unchanged or rounded."""

from dataclasses import dataclass

import torch

from collapipe.errors import WireError
from collapipe.state import HopPrecision
from collapipe.wire.compression.codec import FLOAT32, decode, encode, layout
from pipeline.stage import Passed


@dataclass(frozen=True, slots=True)
class HopCodec:
    """Rounds the first tensor, [b, s, d] of ``dtype``, to ``precision``; others stay unchanged.

    Values are rounded to the nearest. With int8 each row of d values has a separate scale.
    """

    precision: HopPrecision
    dtype: torch.dtype

    def encode(self, made: Passed) -> Passed:
        """Return the tensors to send. Raises ``NonFiniteLossError`` if a value is not finite and
        cannot be rounded."""
        return (*encode(made[0], self.precision), *made[1:]) if made else ()

    def decode(self, received: Passed) -> Passed:
        """Return the tensors to compute with. Raises ``WireError`` for another precision."""
        if self.precision == FLOAT32 and received and received[0].dtype == self.dtype:
            return received
        parts = len(layout((1, 1, 1), self.dtype, self.precision))
        if len(received) < parts:
            raise WireError(f"{len(received)} tensors, expected {parts} for {self.precision}")
        hidden = decode(received[:parts], received[0].shape, self.precision, self.dtype)
        return hidden, *received[parts:]

    def hop(self, made: Passed) -> Passed:
        """Encode and decode, for a hop within a process."""
        if not made or self.precision == FLOAT32:
            return made
        return self.decode(self.encode(made))
