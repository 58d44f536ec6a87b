"""``collapipe resume``: a run goes on from its last checkpoint, as if it had never stopped."""

from collections.abc import Sequence
from pathlib import Path

from collapipe import config
from collapipe.cli.run import quieten, start
from collapipe.run_folder import read_overrides
from server_app.checkpoints.resumption import check_goes_on, load_checkpoint, pick


def resume_run(
    run_dir: Path, overrides: Sequence[str], checkpoint: str | None, trusted: Sequence[str]
) -> None:
    """Train the rounds that are left. Raises ``CollaPipeError`` or ``KeyboardInterrupt``.

    Whatever is wrong with the folder, the checkpoint or the ``overrides`` is said before anything
    is changed or started.
    """
    quieten()
    here = f"hydra.run.dir={config.quoted(run_dir.resolve())}"
    began_with = config.merged(read_overrides(run_dir), [here])
    config.check_overrides(began_with, trusted)
    began = config.load_overrides(began_with)
    name = pick(began, checkpoint)
    found = load_checkpoint(began, name)
    settled = config.merged(began_with, [*overrides, here])
    settings = config.load_overrides(settled)
    check_goes_on(settings, found)
    start(settled, settings, name)
