"""Gradients on devices equal the gradients of torch.distributed.pipelining, an independent
runtime."""

import pytest
import torch
from device_cluster import VOCABULARY, Work, daemons, device_name, plan_of
from sections import optimizer_settings

from collapipe.models.dropout import DropoutKey
from collapipe.models.transformer import TransformerSpec
from collapipe.tensors import Batch
from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

CUT, M, RATE = (1, 2), 2, 1.0


def work() -> Work:
    """Sources of different lengths, in micro-batches of equal size; no dropout."""
    inputs = torch.randint(3, VOCABULARY.size, (4, 7))
    mask = torch.arange(7) < torch.tensor([7, 6, 4, 2])[:, None]
    targets = torch.randint(2, VOCABULARY.size, (4, 5))
    spec = TransformerSpec(3, 1, 16, 2, 24, 0.0)
    return Work(spec, batch=Batch(inputs, mask, targets), optimizer=optimizer_settings("sgd"))


@pytest.mark.thorough  # torch's pipelining takes ten seconds to import
def test_gradients_equal_those_of_torch_pipelining() -> None:
    """An SGD step with learning rate 1 subtracts the gradient."""
    from tests.torch_pipelining import rival

    made, plan = work(), plan_of([device_name(k) for k in range(2)], CUT, M)
    embedding, _, part = made.parts()
    head = LocalHead(part)
    with (
        daemons(2) as there,
        made.segments(plan, there) as segments,
        Pipeline(M, embedding, segments, head, PhaseTimer()) as pipeline,
    ):
        loss = pipeline.run(made.batch, DropoutKey(0, 0, 0))
        pipeline.step(RATE, None)
        after = pipeline.weights() | head.weights()
    with rival(made, CUT, M, "gpipe") as other:
        expected_loss, expected = other.run()
    found = {name: (made.start[name] - after[name]) / RATE for name in expected}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert abs(loss - expected_loss) < 1e-6
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-2
