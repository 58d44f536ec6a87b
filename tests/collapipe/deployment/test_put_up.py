"""What ``deploy init`` writes, and what ``deploy check`` and ``unit`` say before anything runs."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import yaml
from flwr.serverapp import Grid
from sections import federation_settings

from collapipe.cli.run import start
from collapipe.config import load_overrides
from collapipe.credentials import credentials
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.keys import fingerprint
from collapipe.credentials.member import Role
from collapipe.deployment import submitting
from collapipe.deployment.flower import Flower
from collapipe.deployment.server_folder import (
    NODES,
    ServerFolder,
    ServerSection,
    create,
    with_folder,
)
from collapipe.deployment.serving import _Nodes, admissible, keys, signed_names
from collapipe.deployment.unit_file import read_unit
from collapipe.errors import (
    CollaPipeError,
    ConfigError,
    InfeasibleRoundError,
    RefusedUnitError,
    RoundFailedError,
)
from collapipe.owner_file import read_owner
from collapipe.runs.failure import write_failure
from collapipe.wire.messages import Failure, RowsReply
from server_app.places import Places
from server_app.units import Units

Command = Callable[..., tuple[int, str, str]]


def signed(folder: ServerFolder, unit: str, role: Role = Role.UNIT, days: int = 30) -> Path:
    """The unit's file, once its owner has a certificate."""
    own = folder.root / "units" / unit
    AuthorityFolder(folder.authority).add(unit, role, days, own / "credentials")
    (own / "train.csv").write_text("text,label\na,b\n")
    return own / "unit.yaml"


def test_all_that_is_needed_is_written_and_no_secret_leaves(
    command: Command, tmp_path: Path
) -> None:
    where = tmp_path / "federation"
    options = "--units", "berlin, paris", "--server", "edge.example", "--port", 9000
    status, out, _ = command("deploy", "init", where, *options)
    assert status == 0 and "README.md" in out
    assert ServerFolder(where).settings() == ServerSection(
        host="edge.example", port=9000, link_port=8001, units=["berlin", "paris"]
    )
    for number, unit in enumerate(("berlin", "paris")):
        own = where / "units" / unit
        owner = read_owner(own / "unit.yaml")
        assert (owner.name, owner.number, owner.server) == (unit, number, "edge.example:9000")
        assert not [file for file in own.rglob("*") if "PRIVATE" in file.read_text()]
        service = (own / "collapipe-unit.service").read_text().splitlines()
        writable = [line for line in service if line.startswith("ReadWritePaths=")]
        assert (
            writable == ["ReadWritePaths=-/etc/collapipe/kept"]
            and "ProtectSystem=strict" in service
        )
        hopeless = f"{ConfigError.exit_status} {RefusedUnitError.exit_status}"
        assert f"RestartPreventExitStatus={hopeless}" in service
    services = yaml.safe_load((where / "compose.yaml").read_text())["services"]
    server = services["server"]
    assert server["ports"] == ["9000:9000", "8001:8001"]
    assert server["command"] == ["deploy", "serve", str(where)]  # as a process in other tests
    assert server["volumes"] == [{"type": "bind", "source": ".", "target": str(where)}]
    assert server["user"] == f"{where.stat().st_uid}:{where.stat().st_gid}"
    assert [file.name for file in where.rglob("*.key") if file.stat().st_mode & 0o077] == []
    before = {file: file.stat().st_mtime_ns for file in where.rglob("*")}
    status, _, err = command("deploy", "init", where, *options)
    assert status == 2 and "nothing is overwritten" in err
    assert {file: file.stat().st_mtime_ns for file in where.rglob("*")} == before


@pytest.mark.parametrize("units", ["berlin,berlin", "Berlin", "", "a,,b"])
def test_bad_names_make_nothing(units: str, tmp_path: Path, command: Command) -> None:
    status, _, err = command("deploy", "init", tmp_path / "f", "--units", units, "--server", "h")
    assert status == 2 and "name" in err
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_cannot_be_dialled_is_refused(command: Command, tmp_path: Path) -> None:
    """Where it is written, and where an owner has changed it."""
    where = tmp_path / "federation"
    status, _, err = command("deploy", "init", where, "--units", "a", "--server", "bad host")
    assert status == 2 and "bad host" in err and not where.exists()
    create(where, ["a"], "127.0.0.1", 9000, 0)
    file = where / "units" / "a" / "unit.yaml"
    file.write_text(file.read_text().replace("127.0.0.1:9000", "127.0.0.1"))
    with pytest.raises(ConfigError, match=r"unit\.yaml: server: .*HOST:PORT"):
        read_unit(file)


@pytest.mark.parametrize("where", ["units", "server"])
def test_a_deployed_run_reads_the_servers_rows_where_it_evaluates_alone(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = list[str]()
    monkeypatch.setattr(submitting, "submit", lambda name, *_: not submitted.append(name))
    options = []
    for split in ("validation", "test"):
        (tmp_path / f"{split}.csv").write_text("no,columns\nof,it\n")
        options.append(f"data.{split}_file={tmp_path / split}.csv")
    options += ["task=classification", "model=huggingface", "model.family=bert"]
    options += ["runtime=deployment", "runtime.federation=there"]
    options += [f"evaluation.where={where}", f"hydra.run.dir={tmp_path / 'run'}"]
    if where == "server":
        with pytest.raises(CollaPipeError, match=r"validation\.csv"):
            start(options, load_overrides(options))
    else:
        start(options, load_overrides(options))
    assert submitted == (["there"] if where == "units" else [])


@pytest.mark.parametrize(
    ("told", "raised"),
    [
        (None, RoundFailedError("the run failed")),
        (RoundFailedError("every unit failed"), RoundFailedError("every unit failed")),
        (ConfigError("too few nodes"), ConfigError("too few nodes")),
        (InfeasibleRoundError("no plan"), RoundFailedError("no plan")),
    ],
    ids=["nothing", "a round", "an option", "another"],
)
def test_a_deployed_run_that_fails_ends_with_the_servers_words_and_status(
    told: CollaPipeError | None,
    raised: CollaPipeError,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit(federation: str, app_dir: Path, run_dir: Path, *_: object) -> bool:
        if told is not None:
            write_failure(run_dir, told)
        return False

    monkeypatch.setattr(submitting, "submit", submit)
    options = [
        "runtime=deployment",
        "runtime.federation=there",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    with pytest.raises(type(raised), match=str(raised)) as failed:
        start(options, load_overrides(options))
    assert failed.value.exit_status == (told or raised).exit_status
    assert not (tmp_path / "run" / "failure.json").exists()


def test_a_run_takes_what_the_folder_says_unless_told_otherwise(tmp_path: Path) -> None:
    folder = create(tmp_path / "f", ["a", "b"], "2001:db8::1", 9000, 9001)
    told = ["runtime=deployment", f"runtime.federation={folder.root}"]
    settings = load_overrides(with_folder(told))
    assert settings.federation.num_units == 2
    assert settings.link.dialled(9001) == "[2001:db8::1]:9001"
    assert load_overrides(with_folder([*told, "link.port=7"])).link.port == 7
    with pytest.raises(ConfigError, match=r"runtime\.federation=null"):
        load_overrides(["runtime=deployment"])


def test_a_check_names_what_is_wrong(command: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    folder = create(tmp_path / "f", ["berlin", "paris"], "127.0.0.1", port, port)
    file = signed(folder, "berlin", days=5)
    file.with_name("train.csv").unlink()
    status, _, err = command("deploy", "check", file)
    assert status == 1
    assert [line.split(": ")[1] for line in err.splitlines()] == ["certificate", "rows", "server"]
    status, out, err = command("deploy", "check", folder.root)
    assert status == 1 and "valid until" in out
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        f"port {port}",
        "unit berlin",
        "unit paris",
    ]
    assert command("deploy", "check", tmp_path / "nothing")[0] == 2


def test_a_unit_that_lacks_something_does_not_start(command: Command, tmp_path: Path) -> None:
    folder = create(tmp_path / "f", ["berlin", "paris"], "127.0.0.1", 9000, 9001)
    status, _, err = command("unit", folder.root / "units" / "berlin" / "unit.yaml")
    assert status == 2 and "key.pem" in err
    file = signed(folder, "paris", Role.DEVICE)
    status, _, err = command("unit", file)
    assert status == 2 and "--role unit" in err
    for key in ("server", "number", "credentials", "name"):
        lines = file.read_text().splitlines()
        broken = file.with_name("broken.yaml")
        broken.write_text("\n".join(line for line in lines if not line.startswith(f"{key}:")))
        status, _, err = command("unit", broken)
        assert status == 2 and f"{key} is missing" in err


def test_a_port_that_is_taken_is_told_before_anything_starts(
    command: Command, tmp_path: Path
) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", port, port)
        status, out, err = command("deploy", "serve", folder.root)
    assert (status, out) == (2, "") and err.startswith(f"error: port {port}: ")


def test_a_unit_that_is_signed_anew_is_known_once(tmp_path: Path) -> None:
    """And goes when no certificate of its key is valid any more."""
    asked = list[str]()

    class Told(Flower):
        def ask(self, *arguments: str) -> dict[str, str]:
            asked.append(arguments[1])
            return {"node-id": "17"}

    authority = create(tmp_path / "f", ["berlin"], "127.0.0.1", 9000, 9001).authority
    own = tmp_path / "credentials"
    key = credentials.request(own, "berlin")
    for _ in range(2):
        AuthorityFolder(authority).sign(key, Role.UNIT, 30)
    nodes = _Nodes(Told.at(tmp_path))
    for _ in range(2):
        nodes.settle(admissible(AuthorityFolder(authority)))
    assert [*json.loads((tmp_path / NODES).read_text())] == [fingerprint(key.public_key)]
    AuthorityFolder(authority).revoke("berlin")
    nodes.settle(admissible(AuthorityFolder(authority)))
    assert json.loads((tmp_path / NODES).read_text()) == {}
    assert asked == ["register", "unregister"]


def test_a_unit_has_the_name_of_its_certificate_alone(tmp_path: Path) -> None:
    """So that nobody gets what another unit has kept."""
    folder = create(tmp_path / "federation", ["a", "b"], "127.0.0.1", 9000, 0)
    for unit in ("a", "b"):
        signed(folder, unit)
    assert signed_names(folder) == {}
    folder.flower_home.mkdir(exist_ok=True)
    nodes = {keys(folder)["a"]: "11", keys(folder)["b"]: "12"}
    (folder.flower_home / NODES).write_text(json.dumps(nodes))
    places = Places(signed=lambda: signed_names(folder))
    units = Units(cast(Grid, None), federation_settings(num_units=4), places=places)
    told = {11: "a", 12: "a", 13: "whoever"}  # the last has no certificate, or no longer
    answers: dict[int, RowsReply | Failure] = {
        node: RowsReply(node - 11, 1, {}, {}, name) for node, name in told.items()
    }
    units._place(answers, set())
    assert [isinstance(answers[node], RowsReply) for node in told] == [True, False, False]
    assert "calls itself 'a', its certificate is that of b" in str(answers[12])
    assert places.of == {"a": 0}
