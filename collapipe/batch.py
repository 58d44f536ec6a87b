"""A batch of training pairs as tensors."""

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # torch's own ignore_index: a target position that is padding


@dataclass(frozen=True, slots=True)
class Batch:
    """b samples, padded to a common length.

    Attributes
    ----------
    inputs
        int64 [b, s], token ids; padding may hold any valid id.
    mask
        bool [b, s], True where ``inputs`` holds a token.
    targets
        int64 [b, t], what is to be predicted; ``IGNORED`` where there is nothing.
    """

    inputs: Tensor
    mask: Tensor
    targets: Tensor

    @property
    def num_samples(self) -> int:
        """b."""
        return int(self.inputs.shape[0])

    @property
    def num_targets(self) -> int:
        """Target tokens, the divisor of the loss."""
        return int((self.targets != IGNORED).sum())
