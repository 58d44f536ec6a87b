"""``collapipe status --deployment``: the states of the units and the progress of the run."""

import fcntl
import json
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from made_run import made_lines, make_run, write_lines

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment import overview
from collapipe.deployment.server_folder import NODES, ServerFolder, create
from collapipe.deployment.serving import keys
from collapipe.runs.folder import LOCK

Command = Callable[..., tuple[int, str, str]]
UNITS = ["berlin", "paris", "rome", "oslo"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerFolder:
    """The server's folder. Berlin is online, paris is offline, rome was never seen, and oslo has no
    certificate. A run is in progress, but the server's folder does not record the run's folder.
    """
    made = create(tmp_path / "f", UNITS, "127.0.0.1", 9000, 9001)
    for unit in UNITS[:3]:
        AuthorityFolder(made.authority).add(unit, Role.UNIT, 30, tmp_path / unit)
    nodes = {key: str(UNITS.index(name)) for name, key in keys(made).items()}
    (made.flower_home / NODES).write_text(json.dumps(nodes))
    hour_ago = datetime.fromtimestamp(time.time() - 3600, UTC).isoformat()
    answers = {
        "list-nodes": {
            "nodes_info": [
                {"node_id": "2", "status": "registered"},
                {"node_id": "1", "status": "offline", "last_deactivated_at": hour_ago},
                {"node_id": "0", "status": "online", "last_activated_at": hour_ago},
                {"node_id": "7", "status": "unregistered"},
            ]
        },
        "list-runs": {
            "run_dict": {
                "12": {"status": {"status": "running"}},
                "11": {"status": {"status": "finished", "sub_status": "completed"}},
            }
        },
    }
    monkeypatch.setattr(overview, "ask", lambda _, method, __: answers[method])
    return made


def test_units_are_listed_by_name_with_their_state(folder: ServerFolder, command: Command) -> None:
    status, out, err = command("status", "--deployment", folder.root)
    assert (status, err) == (0, "")
    assert [" ".join(line.split()) for line in out.splitlines() if line.split()[:1] != []][2:] == [
        "berlin online 60 min ago",
        "paris offline 60 min ago",
        "rome never seen",
        "oslo not admitted",
        "run 12: running; its folder is not known here",
    ]


def test_the_current_runs_progress_is_shown_if_its_folder_is_known(
    folder: ServerFolder, tmp_path: Path, command: Command
) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").unlink()
    write_lines(run, list(made_lines(20))[:12])
    folder.note_run("12", run)
    with (run / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, _ = command("status", "--deployment", folder.root)
    assert status == 0
    assert "run         running, last written " in out and "round       12 of 20" in out


def test_a_missing_server_or_folder_is_a_one_line_error(tmp_path: Path, command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    made = create(tmp_path / "f", ["berlin"], "127.0.0.1", port, port)
    status, out, err = command("status", "--deployment", made.root)
    assert (status, out, err.count("\n")) == (1, "", 1) and "collapipe deploy serve" in err
    status, out, err = command("status", "--deployment", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "server.yaml" in err
    assert command("status", tmp_path, "--deployment", made.root)[0] == 2
