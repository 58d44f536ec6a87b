"""What one encoder block of the classic Transformer costs, from its sizes."""

from collapipe.state import BlockCost

_FLOAT_BYTES = 4  # float32
_COPIES = 4  # weights, gradients and AdamW's two moments


def transformer_block_cost(
    dim: int, feed_forward_dim: int, tokens: int, batch_size: int
) -> BlockCost:
    """Cost of a block of width d with inner width f for samples of T tokens, in float32.

    Forward: 2·T·(4d² + 2df) FLOPs of the six linear layers and 4·T²·d of attention; backward twice
    that. Parameters: 4d² + 2df + 9d + f. A hop carries T·d values each way. The stash is what
    autograd keeps of a sample, T·(10d + f) values, for all samples of a batch, as GPipe keeps them:
    more than 1F1B does.
    """
    weights = 4 * dim**2 + 2 * dim * feed_forward_dim
    parameters = weights + 9 * dim + feed_forward_dim
    stash = batch_size * tokens * (10 * dim + feed_forward_dim)
    forward_flops = float(2 * tokens * weights + 4 * tokens**2 * dim)
    bits = float(8 * _FLOAT_BYTES * tokens * dim)
    return BlockCost(
        forward_flops=forward_flops,
        backward_flops=2 * forward_flops,
        activation_bits=bits,
        gradient_bits=bits,
        block_bytes=float(_FLOAT_BYTES * (_COPIES * parameters + stash)),
    )
