"""A run of a few short rounds, which measures the steps of later runs with the same options."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from client_app.devices.law_of_rounds import with_other_size
from collapipe.cli.run import run_job
from collapipe.config.overrides import merged, setting
from collapipe.devices.kept_law import unpack_law
from collapipe.errors import CollaPipeError, printable
from collapipe.process.folders import TemporaryFolder
from collapipe.runs.reading import read_run
from collapipe.state import AffineLaw
from collapipe.step_law import StepLaw
from collapipe.wire.messages import STEP_LAW
from server_app.checkpoints.folder import CheckpointFolder

_ROUNDS, _FEWEST_STEPS, _MOST_STEPS = 4, 2, 8
_ROUNDS_OF_OTHER_SIZE = 2  # with half the micro-batches
_SECONDS = 45.0  # of the first rounds' steps, by the measured laws; other parts take time, too
_OPTIONS = (
    *("cluster=devices", "runtime=local", "environment=static", "pipeline.profile=null"),
    "pipeline.keep_shares=false",
    *("federation.on_infeasible=stop", "tracking.mlflow=null"),
)


def least_step_s(rows: float, laws: Sequence[AffineLaw]) -> float:
    """Return the seconds in which devices with these laws compute so many rows times blocks."""
    return rows / sum(1 / law.u for law in laws)


def steps_of(step_s: float) -> int:
    """Return the local steps of a trial round, fewer if a step takes long."""
    steps = round(_SECONDS / _ROUNDS / step_s)
    return min(max(steps, _FEWEST_STEPS), _MOST_STEPS)


def measured_steps(
    file: Path, num_clusters: int, overrides: Sequence[str], local_steps: int
) -> tuple[Mapping[str, object], list[StepLaw | None]]:
    """Train a few rounds with the options ``overrides``, and then with fewer micro-batches, which
    may be impossible. Return the options of the first run, and the measured law of each cluster's
    step. Raises ``CollaPipeError`` if the first run fails."""
    units = [f"federation.num_units={num_clusters}"]

    def run(rounds: int, *more: str) -> tuple[Mapping[str, object], list[StepLaw | None]]:
        with TemporaryFolder("measure") as folder, redirect_stdout(sys.stderr):
            own = (
                setting("cluster.file", file.resolve()),
                setting("hydra.run.dir", folder / "run"),
                *(f"federation.{name}={rounds}" for name in ("rounds", "eval_every")),
                f"federation.checkpoint_every={rounds}",  # which has the laws
                f"federation.local_steps={local_steps}",
            )
            run_dir = run_job(merged(merged(units, overrides), [*_OPTIONS, *own, *more]))
            return read_run(run_dir).tree, laws_of(run_dir, num_clusters)

    tree, laws = run(_ROUNDS)
    if (most := max((law.num_micro_batches for law in laws if law), default=1)) == 1:
        return tree, laws
    fewer = f"pipeline.num_micro_batches={most // 2}"
    try:
        _, others = run(_ROUNDS_OF_OTHER_SIZE, fewer)
    except CollaPipeError as error:  # such as too little memory
        print(f"not measured with {fewer}: {printable(str(error))}", file=sys.stderr)
        return tree, laws
    pairs = zip(laws, others, strict=True)
    return tree, [with_other_size(law, other) if law and other else law for law, other in pairs]


def laws_of(run_dir: Path, num_units: int) -> list[StepLaw | None]:
    """Return the law of each unit's step in the run's last checkpoint, None if it has none."""
    kept = CheckpointFolder(run_dir).kept
    return [unpack_law(kept.get(unit, {}).get(STEP_LAW, {})) for unit in range(num_units)]
