"""The cost of an encoder block in FLOPs, bits and bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of one encoder block on a device."""

    forward_flops: float  # o_l, per sample
    backward_flops: float  # o'_l, per sample
    activation_bits: float  # z^s, per sample and hop
    gradient_bits: float  # g^s, per sample and hop
    block_bytes: float  # γ_0: weights, gradients, optimiser state and tensors saved for backward
    sample_bytes: float = 0.0  # tensors saved for backward of the current micro-batch, per sample
    segment_bytes: float = 0.0  # of any number of blocks: kept inputs, a weight once more
    batch_block_bytes: float = 0.0  # of ``block_bytes``, for all samples of a batch
    batch_segment_bytes: float = 0.0  # of ``segment_bytes``, likewise
    trained_bytes: float = 0.0  # of a block's gradients; 0: not known

    def segment_needs(
        self, blocks: int, samples: float, kept: float = 1.0, gradients: float = 0.0
    ) -> float:
        """Return the bytes of a segment (C7) on a device that computes ``samples`` samples of a
        micro-batch.

        The device keeps tensors of ``kept`` of a batch's samples at the same time. ``gradients``
        counts blocks' gradients beyond one set.
        """
        others = 1 - kept
        each = self.block_bytes + self.sample_bytes * samples
        needed = self.segment_bytes - others * self.batch_segment_bytes
        needed += blocks * (each - others * self.batch_block_bytes)
        return needed + gradients * self.trained_bytes

    @property
    def flops(self) -> float:
        """FLOPs of both passes, per sample."""
        return self.forward_flops + self.backward_flops

    @property
    def hop_bits(self) -> float:
        """Bits of activations and gradients, per sample and hop."""
        return self.activation_bits + self.gradient_bits

    @property
    def forward_share(self) -> float:
        """Forward's fraction of a block's FLOPs."""
        return self.forward_flops / self.flops
