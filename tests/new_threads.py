"""A matrix product whose last bits show how many threads compute it."""

import torch
from torch import Tensor

_WIDE = torch.linspace(-1, 1, 8 * 100_000).reshape(8, -1)


def product() -> Tensor:
    """Return a product that torch's matrix library divides among the threads it may use."""
    return _WIDE @ _WIDE.T
