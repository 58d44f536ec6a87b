"""Submit runs to a deployed federation's SuperLink, and wait until they end."""

import os
from functools import partial
from pathlib import Path

from collapipe.config import Settings
from collapipe.deployment.overview import ONLINE, overview, run_states
from collapipe.deployment.run_archive import bring
from collapipe.deployment.server_folder import ServerFolder
from collapipe.errors import LinkError
from collapipe.flower.commands import Flower, StatesOf
from collapipe.process.children import DIRECT
from collapipe.process.folders import TemporaryFolder, in_home
from collapipe.runs.reading import how_to_go_on


def submit(app_dir: Path, settings: Settings, how: str, resume: str | None = None) -> bool:
    """Run the Flower app in ``app_dir`` on a federation, and return whether it succeeded.

    If the federation is named, its server may be elsewhere, and the run's folder is copied here.
    The app gets ``settings`` and ``resume`` as ``run_simulation`` says, and its output goes to
    standard output. An interrupt stops the run on all machines. Raises ``LinkError`` if the
    SuperLink does not answer or refuses; the error names ``how``, the command that resumes the run.
    """
    federation = str(settings.runtime.federation)
    states_of: StatesOf | None = None
    with TemporaryFolder("flwr") as empty:
        if Path(federation).is_dir():
            server = ServerFolder(Path(federation))
            server.update_connection()
            home, connection, states_of = server.flower_home, [], partial(run_states, server)
            print(_opening(server), flush=True)
        else:
            home = Path(in_home(os.environ.get("FLWR_HOME", "~/.flwr")))
            connection = [federation]
            print(f"submitting   to {federation}", flush=True)
        flower = Flower.at(home, DIRECT, empty)
        run_id = flower.submit(app_dir, settings.text, resume, *connection)
        print(f"submitted    run {run_id}", flush=True)
        try:
            succeeded = flower.wait(run_id, *connection, states_of=states_of)
        except KeyboardInterrupt:
            try:
                flower.ask("stop", run_id, *connection)
            except LinkError as error:
                if "[code: 18]" not in str(error):  # of a run that has ended
                    raise
                print(f"ended        run {run_id}, before it was stopped", flush=True)
                raise KeyboardInterrupt from error
            advice = _advice(settings, how, here=not connection)
            print(f"stopped      run {run_id} on all machines; {advice}", flush=True)
            raise
        except LinkError as error:
            raise LinkError(
                f"the SuperLink has ended or cannot be reached, and with it run {run_id} "
                f"({error}); start it again; {_advice(settings, how, here=not connection)}"
            ) from error
        if connection:
            bring(home, federation, run_id, Path(settings.run_dir))
        return succeeded


def _advice(settings: Settings, how: str, *, here: bool) -> str:
    """Return what to do after a run that ended early; its folder may be ``here``."""
    return how_to_go_on(Path(settings.run_dir), how) if here else f"it goes on with: {how}"


def _opening(server: ServerFolder) -> str:
    """Return a line with the units that are online and those for which a run will wait."""
    units, _ = overview(server)
    there = [each.name for each in units if each.state == ONLINE]
    missing = [each.name for each in units if each.state != ONLINE]
    online = f"{', '.join(there)} online" if there else "no unit is online"
    waiting = f"; waiting for {', '.join(missing)}" if missing else ""
    return f"submitting   to {server.root}: {online}{waiting}"
