"""A batch cut into micro-batches whose sizes differ by at most one."""

import torch

from collapipe.batch import Batch


def split(batch: Batch, num_micro_batches: int) -> list[Batch]:
    """m micro-batches in the samples' order, b̂ = b/m (eq. 5) rounded up for the first ones.

    A batch of fewer than m samples is cut into single samples.
    """
    count = min(num_micro_batches, batch.num_samples)
    columns = (torch.tensor_split(t, count) for t in (batch.inputs, batch.mask, batch.targets))
    return [Batch(*tensors) for tensors in zip(*columns, strict=True)]
