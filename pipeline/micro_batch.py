"""A batch cut into micro-batches whose sizes differ by at most one."""

from torch import Tensor

from collapipe.tensors import IGNORED, Batch


def split(batch: Batch, num_micro_batches: int) -> list[Batch]:
    """Cut a batch into m micro-batches of b̂ = b/m samples (eq. 5), rounded up for the first ones.
    With fewer than m samples each micro-batch has one.

    Samples of similar length share a micro-batch, which is padded only to its longest sample. This
    saves computation, and the order of samples does not change the sum of losses.
    """
    count = min(num_micro_batches, batch.num_samples)
    if count == 1:
        return [batch]
    longest_first = batch.mask.bool().sum(1).argsort(descending=True, stable=True)
    return [_gather(batch, rows) for rows in longest_first.tensor_split(count)]


def _gather(batch: Batch, rows: Tensor) -> Batch:
    mask, targets = batch.mask[rows], batch.targets[rows]
    sources, width = _used(mask), _used(targets != IGNORED)
    places = None if batch.rows is None else batch.rows[rows]
    return Batch(batch.inputs[rows, :sources], mask[:, :sources], targets[:, :width], places)


def _used(mask: Tensor) -> int:
    """Columns up to the last one that any row uses; at least one."""
    columns = mask.any(0).nonzero()
    return int(columns.max()) + 1 if len(columns) else 1
