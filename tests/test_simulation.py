"""``flwr run`` end to end: Flower's simulation engine gives the weights that one process gives."""

from pathlib import Path

import pytest
import torch
from federated import TINY, weights

from collapipe.cli.run import run_job
from collapipe.errors import DataError

TWO_NODES = (*TINY, "federation.num_units=2", "model.dropout=0.1")


def test_a_simulation_ends_with_the_same_bits_as_one_process(tmp_path: Path) -> None:
    run_job([*TWO_NODES, f"hydra.run.dir={tmp_path / 'local'}"])
    run_job([*TWO_NODES, "runtime=simulation", f"hydra.run.dir={tmp_path / 'simulated'}"])
    local, simulated = weights(tmp_path / "local"), weights(tmp_path / "simulated")
    assert local.keys() == simulated.keys()
    assert [name for name in local if not torch.equal(local[name], simulated[name])] == []
    assert (tmp_path / "simulated" / "summary.json").exists()


def test_what_is_wrong_with_the_data_is_said_before_flower_starts(tmp_path: Path) -> None:

    (tmp_path / "empty").mkdir()
    options = ["task=multi30k", f"data.root={tmp_path / 'empty'}", f"hydra.run.dir={tmp_path}/run"]
    with pytest.raises(DataError, match="has neither"):
        run_job(["runtime=simulation", *options])
