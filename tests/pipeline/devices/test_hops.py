"""What a device takes from its neighbour."""

import pytest
import torch

from collapipe.errors import WireError
from collapipe.wire.frames import FrameKind
from pipeline.devices.hops import Fence
from pipeline.hop_codec import HopCodec

FENCE = Fence(1, 0, 2, 4, HopCodec("float32", torch.float32))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_marks_tokens_or_numbers_their_sequences(dtype: torch.dtype) -> None:
    sent = torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=dtype)
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, *sent)
    hidden, mask = FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer")
    assert mask.dtype == dtype and hidden.shape == (2, 3, 4)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 3), torch.ones(2, 3).long(), torch.ones(6).byte(), torch.ones(2, 4).byte()],
)
def test_another_tensor_is_no_mask(mask: torch.Tensor) -> None:
    frame = FENCE.frame(FrameKind.ACTIVATION, 1, torch.zeros(2, 3, 4), mask)
    with pytest.raises(WireError, match="ACTIVATION of"):
        FENCE.received(frame, FrameKind.ACTIVATION, 1, "a peer")
