"""The control unit requests the memory that the planner counts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federated import settings_of

from client_app.cluster_state import block_cost
from client_app.devices.round_pipeline import DevicePipeline
from collapipe.state import MemoryBudget
from optim.verify.limits import needed_bytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("in_flight", "part", "kept"),
    [(4, 1.0, 1.0), (1, 1.0, 2 / 6), (2, 0.5, 2 / 6), (4, 0.5, 4 / 6)],
)
def test_requested_bytes_are_planned_ones(
    tmp_path: Path, in_flight: int, part: float, kept: float, recompute: bool
) -> None:
    """Six samples in four micro-batches of at most two: a device keeps no more than all six."""
    settings = settings_of(tmp_path, ["batch_size=6"])
    cost, pipeline = block_cost(settings, recompute), SimpleNamespace(_settings=settings, _rows=2)
    memory = MemoryBudget(
        1e12,
        cost.segment_bytes,
        cost.block_bytes,
        cost.sample_bytes,
        cost.batch_segment_bytes,
        cost.batch_block_bytes,
    )
    requested: Any = DevicePipeline._needed_bytes
    expected = float(needed_bytes(memory, 3, 2 * part, kept)) + 2 * cost.trained_bytes  # type: ignore[arg-type]
    assert requested(pipeline, 3, in_flight, part, 2, recompute) == pytest.approx(expected)
