"""``collapipe status --deployment``: who is there, and how far the run is."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import made_lines, make_run, write_lines

from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.member import Role
from collapipe.deployment import overview
from collapipe.deployment.checking import Finding
from collapipe.deployment.flower import Flower
from collapipe.deployment.server_folder import NODES, ServerFolder, create
from collapipe.deployment.serving import keys

Command = Callable[..., tuple[int, str, str]]
UNITS = ["berlin", "paris", "rome", "oslo"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerFolder:
    """Where berlin is online, paris is not, rome never was, and oslo has no certificate; a run is
    under way, of which nothing is noted."""
    made = create(tmp_path / "f", UNITS, "127.0.0.1", 9000, 9001)
    for unit in UNITS[:3]:
        AuthorityFolder(made.authority).add(unit, Role.UNIT, 30, tmp_path / unit)
    nodes = {key: str(UNITS.index(name)) for name, key in keys(made).items()}
    (made.flower_home / NODES).write_text(json.dumps(nodes))
    hour_ago = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(time.time() - 3600))
    never: dict[str, str] = {"online-at": "N/A", "offline-at": "N/A"}
    answers = {
        "supernode": {
            "nodes": [
                {"node-id": "2", "status": "registered", **never},
                {"node-id": "1", "status": "offline", **never, "offline-at": hour_ago},
                {"node-id": "0", "status": "online", **never, "online-at": hour_ago},
                {"node-id": "7", "status": "unregistered", **never},
            ]
        },
        "list": {
            "runs": [
                {"run-id": "12", "status": "running"},
                {"run-id": "11", "status": "finished:completed"},
            ]
        },
    }

    def answered(_: Flower, *arguments: str) -> dict[str, Any]:
        return answers[arguments[0]]

    monkeypatch.setattr(Flower, "ask", answered)
    monkeypatch.setattr(overview, "superlink", lambda folder: Finding("port"))
    return made


def test_units_are_told_by_their_names(folder: ServerFolder, command: Command) -> None:
    status, out, err = command("status", "--deployment", folder.root)
    assert (status, err) == (0, "")
    assert [" ".join(line.split()) for line in out.splitlines() if line.split()[:1] != []][2:] == [
        "berlin online 60 min ago",
        "paris offline 60 min ago",
        "rome never seen",
        "oslo not admitted",
        "run 12: running; its folder is not known here",
    ]


def test_the_run_under_way_is_told_where_its_folder_is_here(
    folder: ServerFolder, tmp_path: Path, command: Command
) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").unlink()
    write_lines(run, list(made_lines(20))[:12])
    folder.note_run("12", run)
    status, out, _ = command("status", "--deployment", folder.root)
    assert status == 0
    assert "run         running, last written " in out and "round       12 of 20" in out


def test_where_nothing_serves_or_is_a_folder_is_one_line(tmp_path: Path, command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    made = create(tmp_path / "f", ["berlin"], "127.0.0.1", port, port)
    status, out, err = command("status", "--deployment", made.root)
    assert (status, out, err.count("\n")) == (1, "", 1) and "collapipe deploy serve" in err
    status, out, err = command("status", "--deployment", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "server.yaml" in err
    assert command("status", tmp_path, "--deployment", made.root)[0] == 2
