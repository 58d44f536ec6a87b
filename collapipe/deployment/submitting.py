"""Runs on a deployed federation: submitted to its SuperLink, watched until they end."""

import os
from collections.abc import Sequence
from pathlib import Path

from collapipe.deployment.bringing import bring
from collapipe.deployment.flower import Flower, run_config
from collapipe.deployment.server_folder import ServerFolder
from collapipe.home import in_home
from collapipe.processes import DIRECT
from collapipe.temporary import TemporaryFolder


def submit(
    federation: str, app_dir: Path, run_dir: Path, overrides: Sequence[str], resume: str = ""
) -> bool:
    """Run the Flower app in ``app_dir`` on a federation: the folder of ``collapipe deploy init``,
    or a name of Flower's configuration; whether it succeeded.

    Of a named one, whose server may be elsewhere, ``run_dir`` is brought here. The app gets
    ``overrides`` and ``resume`` as ``run_simulation`` says, and its output goes to standard output.
    An interrupt stops the run on all machines. Raises ``CollaPipeError`` where the SuperLink does
    not answer or refuses.
    """
    with TemporaryFolder("flwr") as empty:
        if Path(federation).is_dir():
            home, connection = ServerFolder(Path(federation)).flower_home, []
        else:
            home = Path(in_home(os.environ.get("FLWR_HOME", "~/.flwr")))
            connection = [federation]
        flower = Flower.at(home, DIRECT, empty)
        run_id = flower.submit(app_dir, *connection, "--run-config", run_config(overrides, resume))
        try:
            succeeded = flower.wait(run_id, *connection)
        except KeyboardInterrupt:
            flower.ask("stop", run_id, *connection)
            raise
        if connection:
            bring(home, federation, run_id, run_dir)
        return succeeded
