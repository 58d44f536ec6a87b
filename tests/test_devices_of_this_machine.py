"""Each device that torch finds on this machine trains like its CPU."""

import sys

import pytest
import torch
from huggingface import batch_for
from learning import check_close, learned

from collapipe.models.transformer import TransformerSpec
from collapipe.process.torch_device import CPU, present


@pytest.mark.parametrize("device", present())
def test_a_device_of_this_machine_trains_like_its_cpu(device: str) -> None:
    """Without dropout, because kinds of devices draw different random numbers."""
    if device != "cpu" and "second_device" in sys.modules:
        pytest.skip("torch has one kind of device besides the CPU, here a simulated one: run alone")
    spec = TransformerSpec(4, 2, dim=16, num_heads=2, feed_forward_dim=24, dropout=0.0)
    batch = batch_for("decoder")
    found, expected = learned(spec, batch, torch.device(device)), learned(spec, batch, CPU)
    check_close(found, expected, tolerance=1e-3)
