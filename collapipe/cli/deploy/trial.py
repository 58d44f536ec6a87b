"""``collapipe deploy trial``: run a server and units on this machine, with temporary keys."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from collapipe.cli.up import Started, run_or_wait, started
from collapipe.config.overrides import typed
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment.server_folder import ServerFolder, create
from collapipe.flower.commands import free_port
from collapipe.process.folders import TemporaryFolder
from collapipe.process.streams import complain
from collapipe.runs.confirmation import started_by

_NAMES = "berlin", "paris", "rome"  # the first units; the others are called unit-3, unit-4, …
_HOST, _DAYS, _ROWS = "127.0.0.1", 30, 1000  # synthetic rows of a unit
_LAST = 5  # lines of a unit's log
_TEMPLATE_ROWS, _OWN_ROWS = "train.csv", "train.jsonl"


def trial(units: int, rows: Path | None, run: Sequence[str], program: Sequence[str]) -> int:
    """Start a server and ``units``, and run the command ``run`` on them.

    Each unit gets a part of ``rows``, or synthetic rows of ``task=dates``. ``program`` starts
    ``collapipe`` with the arguments after it. Returns the command's exit status; without a command,
    0 after Ctrl-C.
    """
    names = [*_NAMES, *(f"unit-{number}" for number in range(len(_NAMES), units))][:units]
    with ExitStack() as stack:
        logs = stack.enter_context(TemporaryFolder("trial"))
        folder = create(logs / "federation", names, _HOST, free_port(), free_port())
        _deal(rows, folder, names)
        serve = "deploy", "serve", str(folder.root)
        commands = {logs / "server.log": Started(serve, " admitted", units)}
        for name in names:
            own = str(folder.root / "units" / name / "unit.yaml")
            commands[logs / f"{name}.log"] = Started(("unit", own), f"{name}: dials ", 1)
        processes = stack.enter_context(started(program, commands))
        on_them = ["runtime=deployment", typed("runtime.federation", folder.root)]
        command = [*run, *on_them] if run else []
        again = f"--units={units}", *([] if rows is None else [f"--rows={rows}"])
        stack.enter_context(started_by("deploy", "trial", *again))
        where = f"logs      {logs}/*.log"
        what = "the server and its units"
        status = run_or_wait(program, command, on_them, where, what, processes)
        for name in names if status == 1 else ():  # its log is removed
            last = (logs / f"{name}.log").read_text().splitlines()[-_LAST:]
            complain("\n".join([f"log of {name}:", *last]))
        return status


def _deal(file: Path | None, folder: ServerFolder, names: Sequence[str]) -> None:
    """Give each unit credentials and its part of the rows of ``file``."""
    from collapipe.data.files import read_file  # imports datasets, which takes seconds
    from collapipe.tasks.dates import draw

    rows = draw(_ROWS * len(names), seed=0) if file is None else read_file(file, "--rows", ())
    authority = AuthorityFolder(folder.authority)
    for number, name in enumerate(names):
        own = folder.root / "units" / name
        authority.add(name, Role.UNIT, _DAYS, own / "credentials")
        with (own / _OWN_ROWS).open("w", encoding="utf-8") as lines:
            for row in rows.shard(len(names), number, contiguous=False):
                lines.write(json.dumps(row) + "\n")
        unit_file = own / "unit.yaml"
        unit_file.write_text(unit_file.read_text().replace(_TEMPLATE_ROWS, _OWN_ROWS))
