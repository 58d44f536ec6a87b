"""``deploy init``, ``deploy check``, the start of ``unit``, and the submission of a run."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from client_app import dry_run
from collapipe.cli.run import start
from collapipe.config import Settings, load_overrides, outline
from collapipe.credentials import credentials
from collapipe.credentials.authority import AuthorityFolder
from collapipe.credentials.keys import fingerprint
from collapipe.credentials.member import Role
from collapipe.deployment import overview, serving, submitting
from collapipe.deployment.checking import read_unit
from collapipe.deployment.control import ask
from collapipe.deployment.overview import UnitThere
from collapipe.deployment.server_folder import (
    NODES,
    ServerFolder,
    ServerSection,
    create,
    with_folder,
)
from collapipe.deployment.serving import Nodes, keys, signed_names
from collapipe.errors import (
    CollaPipeError,
    ConfigError,
    InfeasibleRoundError,
    LinkError,
    RefusedUnitError,
    RoundFailedError,
    StorageError,
)
from collapipe.flower.commands import Flower
from collapipe.owner_file import read_owner
from collapipe.runs.failure import write_failure
from collapipe.wire.messages import Failure, RowsReply
from server_app.places import Places

Command = Callable[..., tuple[int, str, str]]


def signed(folder: ServerFolder, unit: str, role: Role = Role.UNIT, days: int = 30) -> Path:
    """Give a unit a certificate and a row. Returns the unit's file."""
    own = folder.root / "units" / unit
    AuthorityFolder(folder.authority).add(unit, role, days, own / "credentials")
    (own / "train.csv").write_text("text,label\na,b\n")
    return own / "unit.yaml"


def test_init_writes_all_files_and_puts_no_private_key_in_units_folders(
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
    assert server["command"] == ["deploy", "serve", str(where)]  # other tests run this command
    assert server["volumes"] == [{"type": "bind", "source": ".", "target": str(where)}]
    assert server["user"] == f"{where.stat().st_uid}:{where.stat().st_gid}"
    assert [file.name for file in where.rglob("*.key") if file.stat().st_mode & 0o077] == []
    before = {file: file.stat().st_mtime_ns for file in where.rglob("*")}
    status, _, err = command("deploy", "init", where, *options)
    assert status == 2 and "nothing is overwritten" in err
    assert {file: file.stat().st_mtime_ns for file in where.rglob("*")} == before


@pytest.mark.parametrize("units", ["berlin,berlin", "Berlin", "", "a,,b"])
def test_init_with_invalid_unit_names_writes_nothing(
    units: str, tmp_path: Path, command: Command
) -> None:
    status, _, err = command("deploy", "init", tmp_path / "f", "--units", units, "--server", "h")
    assert status == 2 and "name" in err
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_server_address_is_refused(command: Command, tmp_path: Path) -> None:
    """Both as an option of ``deploy init`` and in a file that an owner has changed."""
    where = tmp_path / "federation"
    status, _, err = command("deploy", "init", where, "--units", "a", "--server", "bad host")
    assert status == 2 and "bad host" in err and not where.exists()
    create(where, ["a"], "127.0.0.1", 9000, 0)
    file = where / "units" / "a" / "unit.yaml"
    file.write_text(file.read_text().replace("127.0.0.1:9000", "127.0.0.1"))
    with pytest.raises(ConfigError, match=r"unit\.yaml: server: .*HOST:PORT"):
        read_unit(file)


@pytest.mark.parametrize("verb", ["serve", "check"])
@pytest.mark.parametrize("damaged", ["server.key", "server.crt"])
def test_a_damaged_key_or_certificate_of_the_server_is_a_one_line_error(
    damaged: str, verb: str, command: Command, tmp_path: Path
) -> None:
    folder = create(tmp_path / "f", ["a"], "127.0.0.1", 9000, 9001)
    (folder.key.parent / damaged).write_text("-----BEGIN")
    status, out, err = command("deploy", verb, folder.root)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "server.key" in err and "server.crt" in err and "restore" in err


@pytest.mark.parametrize("verb", ["serve", "check"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("key that others can read", r"server\.key: has mode 644, .*chmod 600"),
        (
            "missing certificate",
            r"server\.crt: cannot be read \(No such file .*restore both, or collapipe deploy renew",
        ),
        ("of another authority", r"server\.crt: is not signed by .*authority\.crt; restore both"),
    ],
)
def test_an_exposed_key_or_a_missing_or_foreign_certificate_of_the_server_is_refused(
    fault: str, words: str, verb: str, command: Command, tmp_path: Path
) -> None:
    folder = create(tmp_path / "f", ["a"], "127.0.0.1", 9000, 9001)
    if fault.startswith("key"):
        folder.key.chmod(0o644)
    elif fault.startswith("of"):
        create(tmp_path / "g", ["a"], "127.0.0.1", 9000, 9001).key.parent.rename(tmp_path / "g/s")
        for file in (folder.key, folder.certificate):
            shutil.copy(tmp_path / "g/s" / file.name, file)
    else:
        folder.certificate.unlink()
    status, out, err = command("deploy", verb, folder.root)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert re.search(words, err)


def test_a_run_is_submitted_without_importing_heavy_libraries(tmp_path: Path) -> None:
    """Checks that need libraries such as torch are left to the server's app: here, the model does
    not fit the task. ``collapipe status`` does not import Hydra, torch or Flower.
    """
    folder = create(tmp_path / "f", ["a"], "127.0.0.1", 9000, 9001)
    script = f"""if True:
        import sys
        import collapipe.cli.status, collapipe.deployment.overview
        print(*{{"hydra", "omegaconf", "torch", "flwr"}} & sys.modules.keys())
        from collapipe.cli.run import run_job
        from collapipe.deployment import submitting
        submitting.submit = lambda *_: True
        run_job(["task=classification", "runtime=deployment", "runtime.federation={folder.root}",
                 "hydra.run.dir={tmp_path / "run"}"])
        print(*{{"torch", "datasets", "transformers", "flwr"}} & sys.modules.keys())"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n\n", done.stderr


def test_a_submitted_run_lists_missing_units_and_reports_a_lost_super_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second line has the number of the run. If the SuperLink ends or does not know the run,
    the error has the command that resumes the run, if it has a checkpoint.
    """
    folder = create(tmp_path / "f", ["a", "b", "c"], "127.0.0.1", 9000, 9001)
    states = {"a": "online", "b": "never seen", "c": "online"}
    units = [UnitThere(name, state, None) for name, state in states.items()]
    monkeypatch.setattr(submitting, "overview", lambda _: (units, []))
    monkeypatch.setattr(Flower, "submit", lambda *_: "17")
    monkeypatch.setattr(Flower, "_stream_log", lambda *_: None)
    options = [f"runtime.federation={folder.root}", f"hydra.run.dir={tmp_path / 'run'}"]
    arguments = tmp_path, outline(["runtime=deployment", *options]), "resume it"
    for status, succeeded in (("completed", True), ("failed", False)):
        answer = {"run_dict": {"17": {"status": {"status": "finished", "sub_status": status}}}}
        monkeypatch.setattr(overview, "ask", lambda *_, answer=answer: answer)
        assert submitting.submit(*arguments) is succeeded
        first, second = capsys.readouterr().out.splitlines()
        assert first.endswith("a, c online; waiting for b") and "run 17" in second
    for without_run in ({}, {"run_dict": {}}, {"run_dict": {"18": {}}}):  # a restarted SuperLink
        monkeypatch.setattr(overview, "ask", lambda *_, without_run=without_run: without_run)
        with pytest.raises(LinkError, match=r"knows no run 17.*: begin a new run$"):
            submitting.submit(*arguments)
    monkeypatch.setattr(overview, "ask", ask)
    (tmp_path / "run" / "checkpoints" / "000003").mkdir(parents=True)
    with pytest.raises(LinkError, match=r"SuperLink has ended .* run 17 .*round 3 with: resume it"):
        submitting.submit(*arguments)
    monkeypatch.setattr(Flower, "_stream_log", broken)  # not a fault of the SuperLink
    with pytest.raises(StorageError, match=r"^full$"):
        submitting.submit(*arguments)


def broken(*_: object) -> None:
    raise StorageError("full")


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (None, RoundFailedError("the run failed")),
        (RoundFailedError("every unit failed"), RoundFailedError("every unit failed")),
        (ConfigError("too few nodes"), ConfigError("too few nodes")),
        (InfeasibleRoundError("no plan"), RoundFailedError("no plan")),
    ],
    ids=["no failure file", "failed round", "invalid option", "other error"],
)
def test_a_failed_deployed_run_has_the_servers_error_and_exit_status(
    failure: CollaPipeError | None,
    raised: CollaPipeError,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def submit(app_dir: Path, settings: Settings, *_: object) -> bool:
        if failure is not None:
            write_failure(Path(settings.run_dir), failure)
        return False

    monkeypatch.setattr(submitting, "submit", submit)
    options = [
        "runtime=deployment",
        "runtime.federation=there",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    with pytest.raises(type(raised), match=str(raised)) as failed:
        start(outline(options))
    assert failed.value.exit_status == (failure or raised).exit_status
    assert not (tmp_path / "run" / "failure.json").exists()


def test_options_default_to_the_values_of_the_servers_folder(tmp_path: Path) -> None:
    folder = create(tmp_path / "f", ["a", "b"], "2001:db8::1", 9000, 9001)
    options = ["runtime=deployment", f"runtime.federation={folder.root}"]
    settings = load_overrides(with_folder(options))
    assert settings.federation.num_units == 2
    assert settings.link.dialled(9001) == "[2001:db8::1]:9001"
    assert load_overrides(with_folder([*options, "link.port=7"])).link.port == 7
    with pytest.raises(ConfigError, match=r"runtime\.federation=null"):
        load_overrides(["runtime=deployment"])


def test_a_check_lists_all_problems(command: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    folder = create(tmp_path / "f", ["berlin", "paris"], "127.0.0.1", port, port)
    file = signed(folder, "berlin", days=5)
    file.with_name("train.csv").unlink()
    status, out, err = command("deploy", "check", file)
    assert status == 1 and err.count("\n") == 1
    assert problems(out) == ["certificate", "rows", "server"]
    status, out, err = command("deploy", "check", folder.root)
    assert status == 1 and "valid until" in out
    assert problems(out) == [f"port {port}", "unit berlin", "unit paris"]
    assert command("deploy", "check", tmp_path / "nothing")[0] == 2


def problems(checked: str) -> list[str]:
    """The names of the problems. Asserts that each problem has a suggestion."""
    found = [line.partition("PROBLEM: ") for line in checked.splitlines()]
    assert checked.count("→") == checked.count("PROBLEM: ")
    return [what.strip() for what, problem, _ in found if problem]


@pytest.mark.parametrize(
    ("rows", "owner", "expected"),
    [
        ("text,label\na,b\n", "", []),
        ("text,label\na,b\n", "cluster: {file: boxes.yaml}\n", ["devices"]),
        ("text,label\na,b\n", "cluster: {file: dead.yaml}\n", ["device box"]),
        ("review,label\na,b\n", "", []),  # a run's task determines the columns
        ("text,label\na,b\n", "label_column: mood", ["train_file"]),
        ("", "", ["train_file"]),
        ("text,label\n", "", ["train_file"]),
        ("text,label\na,b\n", "test_file: held.csv", ["test_file"]),
    ],
)
def test_a_check_reads_rows_and_contacts_devices(
    rows: str,
    owner: str,
    expected: list[str],
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = SimpleNamespace(devices=(), losses=(1.0,))
    monkeypatch.setattr(dry_run, "train_one_step", lambda *_: trained)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", port, port)
    file = signed(folder, "berlin")
    file.with_name("train.csv").write_text(rows)
    file.with_name("dead.yaml").write_text(
        "batch_size: 8\nmodel: {name: transformer}\nclusters:\n  - name: desk\n    devices:\n"
        f"      - {{name: box, address: '127.0.0.1:{port}', flops_per_s: 1.0e10, "
        "d2d_rate_bps: 8.0e9, memory_bytes: 1.0e9}\n"
    )
    own = owner if owner.startswith("cluster") else f"  {owner}\n"
    file.write_text(file.read_text().replace("# cluster:", f"{own}# cluster:"))
    _, out, _ = command("deploy", "check", file)
    assert problems(out) == ["server", *expected]
    assert ("a step of training" in out) is (not expected)


def test_a_unit_with_missing_credentials_or_options_does_not_start(
    command: Command, tmp_path: Path
) -> None:
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


def test_a_port_in_use_is_reported_before_anything_starts(command: Command, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", port, port)
        status, out, err = command("deploy", "serve", folder.root)
    assert (status, out) == (2, "") and err.startswith(f"error: port {port}: ")


def test_a_unit_with_two_certificates_of_one_key_is_registered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit is unregistered once its key has no valid certificate."""
    methods = list[str]()

    def answered(_: ServerFolder, method: str, question: Mapping[str, str]) -> dict[str, str]:
        methods.append(method)
        return {"node_id": "17"}

    monkeypatch.setattr(serving, "ask", answered)
    folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", 9000, 9001)
    authority = folder.authority
    own = tmp_path / "credentials"
    key = credentials.request(own, "berlin")
    for _ in range(2):
        AuthorityFolder(authority).sign(key, Role.UNIT, 30)
    nodes = Nodes(folder)
    for _ in range(2):
        nodes.settle()
    assert [*folder.nodes()] == [fingerprint(key.public_key)]
    AuthorityFolder(authority).revoke("berlin")
    nodes.settle()
    assert folder.nodes() == {}
    assert methods == ["register-node", "unregister-node"]


def test_a_unit_whose_certificate_expired_stays_registered_and_returns_when_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower never registers a key twice. A problem of the authority's folder ends no server."""
    register = Mock(return_value={"node_id": "17"})
    monkeypatch.setattr(serving, "ask", register)
    folder = create(tmp_path / "f", ["berlin"], "127.0.0.1", 9000, 9001)
    key = credentials.request(tmp_path / "credentials", "berlin")
    file, _ = AuthorityFolder(folder.authority).sign(key, Role.UNIT, 30)
    nodes = Nodes(folder)
    nodes.settle()
    with monkeypatch.context() as patch:
        patch.setattr(AuthorityFolder, "state", lambda *_: "expired")
        nodes.look()
        assert folder.nodes() == {}
    for _ in range(2):
        (damaged := file.with_name("copy.crt")).write_text("-----BEGIN")
        nodes.look()
        assert folder.nodes() == {}
    damaged.unlink()
    nodes.look()
    assert folder.nodes() == {fingerprint(key.public_key): "17"}
    register.assert_called_once()
    first, left_out, warning, again = capsys.readouterr().out.splitlines()
    assert first == again == "unit berlin admitted"
    assert left_out == "unit berlin left out: its certificate has expired; sign its renewal"
    assert warning.startswith(f"warning: {damaged}") and warning.count("copy.crt") == 1


def test_a_unit_must_report_the_name_in_its_certificate(tmp_path: Path) -> None:
    """Otherwise, a unit could take the place of another unit."""
    folder = create(tmp_path / "federation", ["a", "b"], "127.0.0.1", 9000, 0)
    for unit in ("a", "b"):
        signed(folder, unit)
    assert signed_names(folder) == {}
    folder.flower_home.mkdir(exist_ok=True)
    nodes = {keys(folder)["a"]: "11", keys(folder)["b"]: "12"}
    (folder.flower_home / NODES).write_text(json.dumps(nodes))
    places = Places(signed=lambda: signed_names(folder))
    claimed = {11: "a", 12: "a", 13: "whoever"}  # node 13 has no valid certificate
    answers: dict[int, RowsReply | Failure] = {
        node: RowsReply(node - 11, 1, {}, {}, name) for node, name in claimed.items()
    }
    places.claim_all(answers, 4, set())
    assert [isinstance(answers[node], RowsReply) for node in claimed] == [True, False, False]
    assert "reported the name 'a', its certificate names b" in str(answers[12])
    assert places.of == {"a": 0}
