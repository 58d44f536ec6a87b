"""A run that is killed at any moment can be resumed, and ends like an uninterrupted run."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federated import TINY
from resumed import SMALL, World, copied_before_each_write, differing, outcome, tensors
from scripted_units import UNTRAINED, scripted_units

from server_app.checkpoints.folder import CheckpointFolder


def test_a_run_killed_between_any_two_writes_resumes_exactly(tmp_path: Path) -> None:
    """This tests the server's writes. Units are scripted; their updates depend on kept state."""
    world = World(tmp_path, "federation.rounds=2", "federation.keep=1", *UNTRAINED)
    whole, copies = tmp_path / "whole", tmp_path / "copies"
    whole.mkdir()
    with copied_before_each_write(whole, copies) as killed:
        world.run(whole, client=scripted_units())
    expected, learned = outcome(whole), tensors(whole)
    resumed = set()
    for run_dir in killed:
        names = CheckpointFolder(run_dir).names()
        if names:
            world.run(run_dir, names[-1], scripted_units())
            assert differing(tensors(run_dir), learned) == [], run_dir
            assert outcome(run_dir) == expected, run_dir
            resumed.add(names[-1])
    assert resumed == {"000001", "000002"}
    assert len(killed) > 30, "too few writes were observed"


@pytest.mark.thorough
def test_a_kill_during_a_resume_changes_no_result(tmp_path: Path) -> None:
    world = World(tmp_path, "federation.rounds=2", "framework.train=false")
    whole = world.run(tmp_path / "whole")
    again = shutil.copytree(whole, tmp_path / "again", symlinks=True)
    with copied_before_each_write(again, tmp_path / "copies") as killed:
        world.run(again, "000001")
    for run_dir in killed:
        complete = (run_dir / "summary.json").exists()  # not resumed yet
        world.run(run_dir, "000001" if complete else CheckpointFolder(run_dir).names()[-1])
        assert outcome(run_dir) == outcome(whole), run_dir


@pytest.mark.thorough
def test_a_killed_process_can_be_resumed_exactly(tmp_path: Path) -> None:
    options = [*TINY, *SMALL, "federation.rounds=8", "federation.keep=1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "collapipe", "run", *options]
    with subprocess.Popen(
        [*command, f"hydra.run.dir={killed}"], stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (killed / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the process ended before it was killed"
    world = World(tmp_path, *options)
    world.run(whole)
    world.run(killed, CheckpointFolder(killed).names()[-1])
    assert differing(tensors(killed), tensors(whole)) == []
    assert outcome(killed) == outcome(whole)
