"""``collapipe device measure --from``: new runs start with laws that a run has measured."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import federated
import pytest
from device_cluster import daemons
from omegaconf import OmegaConf
from pretrained import causal_folder
from run_files import rounds_of

from client_app.node import cached_units
from collapipe.config import load_overrides
from collapipe.inventory.measured_step import step_file
from collapipe.run_report.packed import read_requests
from collapipe.runs.reading import read_run
from pipeline.stage import Passed, SegmentStage

Command = Callable[..., tuple[int, str, str]]
OPTIONS = (*federated.TINY, "federation.num_units=1", "strategy=all")
LESS = "pipeline.recompute=true", "pipeline.wire_dtype=bfloat16"  # costs differ from the file's


def trained(run_dir: Path, file: Path, rounds: int, resume: str | None = None) -> list[Any]:
    """Train as in a new process. Returns the planned segments of each round."""
    own = "cluster=devices", f"cluster.file={file}", "federation.checkpoint_every=1"
    options = *OPTIONS, *LESS, *own, f"federation.rounds={rounds}"
    settings = federated.settings_of(run_dir, options)
    cached_units.cache_clear()
    federated.train(federated.grid_of(settings), settings, resume)
    lines = rounds_of(run_dir)
    return [each["plan"]["clusters"][0]["segments"] for each in lines]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """An inventory of two devices, one slower than described, and a run that has measured both."""
    folder, forward = tmp_path_factory.mktemp("learnt"), SegmentStage.forward

    def slow(stage: SegmentStage, micro_batch: int, received: Passed) -> Passed:
        if stage.segment.parts[-1].name == "blocks.3":
            time.sleep(0.03)
        return forward(stage, micro_batch, received)

    with daemons(2) as running, patch.object(SegmentStage, "forward", slow):
        hardware = {"flops_per_s": 1e7, "d2d_rate_bps": 1e9}
        devices = [
            {"name": f"device-{k}", "address": each.address, **hardware}
            for k, each in enumerate(running)
        ]
        clusters = [{"name": "home", "devices": devices}]
        tree = {"batch_size": 64, "model": {"name": "transformer"}, "clusters": clusters}
        file = folder / "boxes.yaml"
        file.write_text(f"# as bought\n{json.dumps(tree)}")  # JSON is valid YAML
        trained(folder / "run", file, 2)
        yield file, folder / "run"


def test_a_new_run_starts_with_the_plan_of_a_resumed_run(
    learnt: tuple[Path, Path], command: Command, tmp_path: Path
) -> None:
    file, run_dir = learnt
    before, how = file.read_text(), (*OPTIONS, *LESS, "--from", run_dir)
    status, out, _ = command("device", "measure", file, *how)
    assert (status, step_file(file).exists()) == (0, False)
    rows = [each.split() for each in out.splitlines() if each.startswith("device-")]
    assert [each[0] for each in rows] == ["device-0", "device-1"]
    status, *_ = command("device", "measure", file, *how, "--write")
    assert (status, file.read_text()) == (0, before)
    fresh = trained(tmp_path / "fresh", file, 1)
    resumed = trained(run_dir, file, 3, "000002")
    (first,), (unmeasured, _, third) = (
        [*read_requests(read_run(each))] for each in (tmp_path / "fresh", run_dir)
    )
    assert first.clusters == third.clusters and first.clusters[0].step is not None
    assert unmeasured.clusters[0].step is None
    assert fresh[0] == resumed[2]


def described_anew(file: Path, run_dir: Path) -> None:
    file.write_text(file.read_text().replace("1e7", "1.0e8", 1).replace("10000000.0", "1.0e8", 1))


def named_anew(file: Path, run_dir: Path) -> None:
    file.write_text(file.read_text().replace("device-1", "pi"))


def without_checkpoint(file: Path, run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")


def without_state(file: Path, run_dir: Path) -> None:
    """Delete a unit's state, which is also missing after rounds on simulated devices."""
    (run_dir / "checkpoints/latest/unit-0.safetensors").unlink()


def without_requests(file: Path, run_dir: Path) -> None:
    (run_dir / "requests.jsonl.gz").unlink()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, ["batch_size=8"], "another batch_size, pipeline.recompute, pipeline.wire_dtype;"),
        (None, ["model.dim=32"], "another model, pipeline.recompute,"),
        (described_anew, LESS, "boxes.yaml: describes device-0 otherwise"),
        (named_anew, LESS, "describes device-1, pi otherwise"),
        (without_requests, LESS, "requests.jsonl.gz: lacks plans of unit 0"),
        (without_checkpoint, LESS, "measured times of unit 0"),
        (without_state, LESS, "measured times of unit 0"),
    ],
)
def test_laws_of_a_run_that_does_not_match_are_a_one_line_error(
    learnt: tuple[Path, Path],
    command: Command,
    tmp_path: Path,
    change: Callable[[Path, Path], None] | None,
    options: Sequence[str],
    message: str,
) -> None:
    (file := tmp_path / "boxes.yaml").write_text(learnt[0].read_text())
    run_dir = shutil.copytree(learnt[1], tmp_path / "run", symlinks=True)
    if change:
        change(file, run_dir)
    how = *OPTIONS, *options, "--from", run_dir, "--write"
    status, out, err = command("device", "measure", file, *how)
    assert status and not step_file(file).exists()
    assert message in err and err.count("\n") == 1 and not out


def test_a_relative_folder_of_a_model_is_that_of_the_run(
    learnt: tuple[Path, Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder has the absolute path. Without checkpoints only the options are compared."""
    run_dir = shutil.copytree(learnt[1], tmp_path / "run", symlinks=True)
    without_checkpoint(learnt[0], run_dir)
    length = "task.max_length=40"
    how = "task=causal_lm", length, "data=synthetic", "model=huggingface", "federation.num_units=1"
    folder = causal_folder(tmp_path / "tiny")
    settings = load_overrides([*how, f"model.name={folder}"])
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(settings.tree))))
    monkeypatch.chdir(tmp_path)
    arguments = "device", "measure", learnt[0], *how, "model.name=tiny", "--from", run_dir
    assert "measured times of unit 0" in command(*arguments)[2]
