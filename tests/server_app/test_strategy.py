"""The strategy as Flower's users start theirs: from a ServerApp of three lines."""

from pathlib import Path
from unittest.mock import patch

import torch
from federated import grid_of, run, settings_of
from flwr.app import ArrayRecord, MetricRecord

from collapipe.wire import records
from server_app.strategy import CollaPipeStrategy


def test_a_start_without_our_own_loop_trains_the_same_model(tmp_path: Path) -> None:
    expected = run(tmp_path / "run")
    evaluated = []

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append(round_)
        return MetricRecord({"arrays": len(arrays)})

    settings, overrides = settings_of(tmp_path / "plain", [])
    grid = grid_of(settings, overrides, None)
    strategy = CollaPipeStrategy(settings)
    result = strategy.start(
        grid=grid,
        initial_arrays=strategy.initial_arrays(),
        num_rounds=2,
        evaluate_fn=evaluate,
    )
    found = records.unpack_tensors(result.arrays)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert evaluated == [0, 1, 2]
    assert list(result.train_metrics_clientapp) == [1, 2]
    assert not (tmp_path / "plain").exists()


def test_the_model_is_packed_and_unpacked_once_a_round(tmp_path: Path) -> None:
    """Units' replies aside: at the start, and for the messages of the next round."""
    unpacked, packed = [0], [0]
    unpack, pack = records.unpack_tensors, records.pack_tensors

    def count_unpack(record: ArrayRecord) -> dict[str, torch.Tensor]:
        unpacked[0] += any(name.startswith("head.") for name in record)
        return unpack(record)

    def count_pack(tensors: dict[str, torch.Tensor]) -> ArrayRecord:
        packed[0] += any(name.startswith("head.") for name in tensors)
        return pack(tensors)

    counting = patch.multiple(records, unpack_tensors=count_unpack, pack_tensors=count_pack)
    with counting:
        run(tmp_path, "federation.rounds=4", "federation.eval_every=1")
    assert (packed, unpacked) == ([5], [1])
