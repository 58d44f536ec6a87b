"""``collapipe plan``: how to split a model over an inventory's boxes, and what a batch takes."""

import json
import sys
from pathlib import Path

from collapipe.errors import ConfigError
from collapipe.inventory.file import read_inventory
from collapipe.planning.inventory_plan import plan_inventory
from collapipe.validation import nearest
from optim.solvers import CLUSTER_SOLVERS


def run_plan(file: Path, as_json: bool, solver: str, plot: Path | None) -> None:
    """Solve, and print a table or JSON; draw the pipelines to ``plot`` where it is given.

    Raises ``ConfigError``, before anything is printed.
    """
    if solver not in CLUSTER_SOLVERS:
        known = nearest(solver, sorted(CLUSTER_SOLVERS))
        raise ConfigError(f"--solver {solver}: there is no such solver{known}")
    if plot is not None:
        _check_plot(plot)
    inventory = read_inventory(file)
    plan = plan_inventory(inventory, solver)
    for note in inventory.notes:
        print(f"note: {note}", file=sys.stderr)
    if plot is not None:
        from collapipe.cli.plan.gantt import draw

        draw(plan, plot)
    if as_json:
        from collapipe.cli.plan.json_answer import json_answer

        print(json.dumps(json_answer(plan), indent=2, allow_nan=False))
    else:
        from collapipe.cli.plan.table import show

        show(plan)


def _check_plot(file: Path) -> None:
    if file.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--plot {file}: must end in .svg or .png")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise ConfigError(f"--plot {file}: is a folder; name a file")
