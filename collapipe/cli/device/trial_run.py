"""A short run on an inventory's devices, to measure the steps of later ones."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from collapipe.cli.run import run_job
from collapipe.config.overrides import merged, setting
from collapipe.process.folders import TemporaryFolder
from collapipe.run_report.packed import read_requests
from collapipe.runs.reading import read_run
from collapipe.step_law import StepLaw

_HOW = (
    *("cluster=devices", "runtime=local", "environment=static", "pipeline.profile=null"),
    *("federation.rounds=4", "federation.local_steps=8", "federation.eval_every=4"),
    *("federation.checkpoint_every=0", "federation.on_infeasible=stop", "tracking.mlflow=null"),
)


def measured_steps(
    file: Path, num_clusters: int, overrides: Sequence[str]
) -> tuple[Mapping[str, object], list[StepLaw | None]]:
    """Train a few rounds with the options ``overrides``. Return the options of that run, and the
    measured law of each cluster's step. Raises ``CollaPipeError`` if the run fails."""
    units = [f"federation.num_units={num_clusters}"]
    with TemporaryFolder("measure") as folder, redirect_stdout(sys.stderr):
        own = setting("cluster.file", file.resolve()), setting("hydra.run.dir", folder / "run")
        run = read_run(run_job(merged(merged(units, overrides), [*_HOW, *own])))
        *_, request = read_requests(run)
    return run.tree, [each.step for each in request.clusters]
