"""A run in Flower's simulation engine gives the same weights as a run in one process."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federated import TINY
from run_files import summary_of
from safetensors.torch import load_file

from collapipe.cli.resume import resume_run
from collapipe.cli.run import run_job
from collapipe.errors import ConfigError
from collapipe.flower.commands import Flower
from collapipe.process import folders as temporary

TWO_NODES = (*TINY, "federation.num_units=2", "model.dropout=0.1", "optimizer.decay=constant")
TWO_NODES += ("federation.checkpoint_every=1", "compression=int4", "compression.gradient=int6")


@pytest.mark.timeout(900)  # a dozen processes, each of which imports torch
def test_a_simulation_resumed_in_one_process_equals_a_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of the simulation keep their state in files, which are removed when it ends. Ray
    starts no more processes than units, here one, because each imports torch."""
    remove, kept, submit = shutil.rmtree, list[Path](), Flower.submit

    def on_one_core(flower: Flower, *arguments: Any) -> str:
        *others, nodes = arguments
        cores = f" init-args-num-cpus={min(2, os.cpu_count() or 1)}"
        assert nodes.endswith(cores)
        return submit(flower, *others, nodes.replace(cores, " init-args-num-cpus=1"))

    def removed(folder: Path, **options: bool) -> None:
        found = [*Path(folder).glob("kept/*")]
        assert all(each.stat().st_mode & 0o777 == 0o600 for each in found)
        kept.extend(found)
        remove(folder, **options)

    monkeypatch.setattr(Flower, "submit", on_one_core)
    monkeypatch.setattr(temporary, "shutil", SimpleNamespace(rmtree=removed))
    local, simulated = tmp_path / "local", tmp_path / "simulated"
    run_job([*TWO_NODES, "federation.rounds=3", f"hydra.run.dir={local}"])
    run_job([*TWO_NODES, "federation.rounds=2", "runtime=simulation", f"hydra.run.dir={simulated}"])
    assert len(kept) == 2
    assert not any(each.exists() for each in kept)
    for file in ("tensors", "unit-0", "unit-1"):
        assert_equal(local, simulated, f"checkpoints/000002/{file}.safetensors")
    resume_run(simulated, ["federation.rounds=3", "runtime=local"], None, [])
    assert_equal(local, simulated, "model/model.safetensors")
    summary = summary_of(simulated)
    assert (summary["rounds_completed"], summary["status"]) == (3, "completed")


def assert_equal(local: Path, simulated: Path, file: str) -> None:
    expected, found = (load_file(each / file) for each in (local, simulated))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_an_interrupted_simulation_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower ends the server's app, which writes no summary."""
    run_dir = tmp_path / "run"

    def interrupted(*_: object) -> None:
        (run_dir / "checkpoints" / "000002").mkdir(parents=True)
        raise KeyboardInterrupt

    with (
        patch("collapipe.cli.simulation.run_simulation", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        run_job([*TINY, "runtime=simulation", f"hydra.run.dir={run_dir}"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"go on after round 2 with: collapipe resume {run_dir}"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["data.root=empty"], "lacks"),
        (["data.train_file=rows.xls", "evaluation.where=units"], "must end in one of"),
    ],
)
def test_an_error_in_the_data_is_reported_before_flower_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], fault: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.xls").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=fault):
        run_job(["runtime=simulation", "task=multi30k", f"hydra.run.dir={tmp_path}/run", *options])
